"""The engine in one's own process: a bundle's answer about an image, and a text, without HTTP.

python docs/examples/engine.py BUNDLE IMAGE
"""

import asyncio
import sys
from pathlib import Path

from PIL import Image

from valora_serve.engine.async_engine import start_engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.types import Request, SamplingParams


async def main(bundle: Path, file: Path) -> None:
    engine = await start_engine(EngineSettings(base="tiny", profile=False))
    try:
        domains = [found for found in await engine.load("bundle", bundle) if found.kind == "domain"]
        image = Image.open(file).convert("RGB")
        for domain in domains:
            async for output in engine.generate(Request(domain.name, domain.name, images=[image])):
                if output.head is not None:
                    print(domain.name, output.head.image_fields(0))
        words = [{"type": "text", "text": "describe the image."}, {"type": "image"}]
        asked = Request(
            "words", "tiny", messages=[{"role": "user", "content": words}], images=[image],
            sampling=SamplingParams(max_tokens=40),
        )  # fmt: skip
        async for output in engine.generate(asked):
            print(output.text, end="", flush=True)
        print()
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
