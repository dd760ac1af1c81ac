"""Run an API prompt on a ComfyUI server and save its pictures: queue_prompt.py PROMPT.json [HOST:PORT] [FOLDER]"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import aiohttp


async def main(prompt: str, server: str = "127.0.0.1:8188", folder: str = ".") -> None:
    client, images = uuid.uuid4().hex, []
    async with aiohttp.ClientSession(f"http://{server}") as http, http.ws_connect(f"/ws?clientId={client}") as events:
        async with http.post(
            "/prompt", json={"prompt": json.loads(Path(prompt).read_text()), "client_id": client}
        ) as r:
            queued = await r.json()
        if "prompt_id" not in queued:
            raise SystemExit(json.dumps(queued, indent=2))
        async for message in events:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue  # a preview picture
            event, data = (message.json()[key] for key in ("type", "data"))
            if data.get("prompt_id") != queued["prompt_id"]:
                continue
            if event == "progress":
                print(f"\rstep {data['value']} of {data['max']}", end="", flush=True)
            elif event == "executed":
                images += data["output"].get("images", [])
            elif event == "execution_error":
                raise SystemExit(f"\n{data['node_type']}: {data['exception_message']}")
            elif event == "execution_success":
                break
        for image in images:
            async with http.get("/view", params=image) as r:
                (Path(folder) / image["filename"]).write_bytes(await r.read())
            print(f"\n{Path(folder) / image['filename']}")


asyncio.run(main(*sys.argv[1:]))
