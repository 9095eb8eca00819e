"""What only works with host names and https, by the official SDK as it is; prints what it saw as JSON."""

import json
import urllib.request

from e2b import Sandbox

sandbox = Sandbox.create(timeout=120)
seen = {"host": sandbox.get_host(3000)}
try:
    seen["output"] = sandbox.commands.run("echo over tls").stdout
    sandbox.files.write("a b.txt", "written")
    with urllib.request.urlopen(sandbox.download_url("a b.txt")) as res:
        seen["downloaded"] = res.read().decode()
    seen["running"] = sandbox.is_running()
finally:
    sandbox.kill()
print(json.dumps(seen))
