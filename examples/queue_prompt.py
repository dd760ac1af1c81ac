"""Run an API prompt on a ComfyUI server and save its pictures: queue_prompt.py PROMPT.json [HOST:PORT] [FOLDER]"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import aiohttp


async def main(prompt: str, server: str = "127.0.0.1:8188", folder: str = ".") -> None:
    body = {"prompt": json.loads(Path(prompt).read_text()), "client_id": uuid.uuid4().hex}
    socket = f"/ws?clientId={body['client_id']}"
    async with aiohttp.ClientSession(f"http://{server}") as http, http.ws_connect(socket) as events:
        queued = await (await http.post("/prompt", json=body)).json()
        if "prompt_id" not in queued:
            sys.exit(json.dumps(queued, indent=2))
        async for message in events:
            # Binary messages are previews.
            event = message.json() if message.type == aiohttp.WSMsgType.TEXT else {"type": "preview", "data": {}}
            kind, data = event["type"], event["data"]
            if kind == "progress":
                print(f"\rstep {data['value']} of {data['max']}", end="", flush=True)
            elif kind in ("execution_error", "execution_interrupted"):
                sys.exit(f"\n{data['node_type']}: {data.get('exception_message', 'interrupted')}")
            elif kind == "executing" and data["node"] is None:
                break
        history = await (await http.get(f"/history/{queued['prompt_id']}")).json()
        for output in history[queued["prompt_id"]]["outputs"].values():
            for image in output.get("images", []):
                path = Path(folder) / image["filename"]
                path.write_bytes(await (await http.get("/view", params=image)).read())
                print(f"\n{path}")


asyncio.run(main(*sys.argv[1:]))
