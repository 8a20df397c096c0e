"""Every HTTP endpoint once, against a running server, with httpx alone.

valora demo --no-browser &
python docs/examples/endpoints.py http://localhost:8000
"""

import base64
import json
import sys

import httpx


def main(url: str) -> None:
    client = httpx.Client(base_url=url, timeout=60)

    # What is served, and examples of it.
    models = client.get("/v1/models").json()["data"]
    base = models[0]["id"]
    domain = next(model["id"] for model in models if model["kind"] == "domain")
    example = client.get("/v1/examples").json()["data"][0]
    image = client.get("/" + example["images"][0]).content
    print(base, [model["id"] for model in models if model["kind"] == "domain"])

    # Images in, boxes or labels out: as a form, and as JSON.
    answer = client.post(f"/v1/vision/{domain}", files={"image": image}).json()
    print(answer["results"][0])
    url_of_image = "data:image/png;base64," + base64.b64encode(image).decode()
    body = {"images": [url_of_image], "min_score": 0.3}
    print(client.post(f"/v1/vision/{domain}", json=body).json()["results"][0])

    # All domains about one image, which it is computed once for.
    answer = client.post("/v1/vision", files={"image": image}, data={"domains": "*"}).json()
    print(
        {
            name: found.get("results", found.get("error"))
            for name, found in answer["domains"].items()
        }
    )

    # OpenAI's chat, as a stream; and a completion, a response, an embedding.
    content = [
        {"type": "text", "text": "describe the image."},
        {"type": "image_url", "image_url": {"url": url_of_image}},
    ]
    asked = {"model": base, "stream": True, "messages": [{"role": "user", "content": content}]}
    with client.stream("POST", "/v1/chat/completions", json=asked) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                print(choices[0]["delta"].get("content") or "" if choices else "", end="")
    print()
    body = {"model": base, "prompt": "what color is", "max_tokens": 4}
    print(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    body = {"model": base, "input": "what color is the star?", "max_output_tokens": 8}
    print(client.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"])
    body = {"model": base, "input": "a red star"}
    print(len(client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]))

    # For operators.
    print(client.get("/ready").json(), client.get(f"/v1/models/{domain}").json()["quarantined"])
    print(client.get("/v1/status").json()["mode"], client.get("/version").json()["version"])
    print(len(client.get("/metrics").text.splitlines()), "lines of metrics")


if __name__ == "__main__":
    main(sys.argv[1])
