/** What only works with host names and https, by the official SDK as it is; prints what it saw as JSON. */
import { Sandbox } from "e2b";

const sandbox = await Sandbox.create({ timeoutMs: 120_000 });
const seen = { host: sandbox.getHost(3000) };
try {
  seen.output = (await sandbox.commands.run("echo over tls")).stdout;
  await sandbox.files.write("a b.txt", "written");
  seen.downloaded = await (await fetch(await sandbox.downloadUrl("a b.txt"))).text();
  const form = new FormData();
  form.append("file", new Blob(["uploaded"]), "up.txt");
  seen.upload = (await fetch(await sandbox.uploadUrl("up.txt"), { method: "POST", body: form })).status;
  seen.uploaded = await sandbox.files.read("up.txt");
  await sandbox.commands.run("python3 -m http.server 3000", { background: true, timeoutMs: 0 });
  // Until the server listens the edge says 502.
  for (let res; ; ) {
    res = await fetch(`https://${seen.host}/a%20b.txt`);
    seen.served = await res.text();
    if (res.status === 200) break;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  const socket = new WebSocket(`wss://${sandbox.getHost(3000)}/`);
  seen.webSocket = await new Promise((resolve) => {
    socket.addEventListener("open", () => resolve("open"));
    socket.addEventListener("error", () => resolve("refused by the server"));
  });
  seen.running = await sandbox.isRunning();
} finally {
  await sandbox.kill();
}
console.log(JSON.stringify(seen));
