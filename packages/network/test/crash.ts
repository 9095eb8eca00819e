/** A server that is killed while it makes slots. Says so when the kernel has the first. */
import { silentLogger } from "@aenv/base";
import { Network } from "../src/network.ts";

const [instance = ""] = process.argv.slice(2);
const network = await Network.open({ instance, limit: 128, dns: [], logger: silentLogger });
await network.acquire();
console.log("started");
await network.ensure(100);
console.log("finished");
