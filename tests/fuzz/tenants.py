"""A server with adapters and bundles, and what its tenants ask: each has one right answer."""

import contextlib
import random
from dataclasses import dataclass

import httpx

from tests.e2e.valora_serve.serving import HEADERS, SECRET
from tests.fuzz.driver import served
from tests.support.http_helpers import CHAT, chat, data_url, encoded
from tests.support.media_files import drawing
from tests.support.serve_helpers import DOMAINS as PACK
from tests.support.serve_helpers import make_bundle, make_tenants

ALWAYS, SOMETIMES = ("red", "green", "blue"), ("ash", "elm")  # adapters: loaded always, at times
MORE = ("signs", "things")  # domains of the bundle that is loaded at times


@dataclass(eq=False)
class Question:
    """Something to ask, with one right answer."""

    model: str | None
    text: str
    image: bytes | None
    tokens: int

    def request(self, **more):
        """Path, and how httpx sends it; `more` are fields of the request."""
        if not self.text:
            files = {"image": ("a.png", self.image)}
            return f"/v1/vision/{self.model}", {"files": files, "data": more}
        url = self.image and data_url(self.image)
        settings = {"model": self.model, "temperature": 0, "max_tokens": self.tokens}
        return CHAT, {"json": chat(self.text, url, **settings | more)}


def content_of(answer):
    """What matters of an answer: text, why it ended and probabilities; or a head's results."""
    found = answer.json()
    if "results" in found:
        return found["results"]
    choice = found["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], choice.get("logprobs")


class Tenants:
    """Adapters and bundles in a folder, a server of them, and an administrator's questions."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "store"
        self.base, _, self.bundle = make_tenants(folder)
        domains = dict(zip(MORE, (PACK["scene"], PACK["plates"]), strict=True))
        make_bundle(self.store / "more", self.base, name="more", domains=domains, seed=4)
        draw, self.questions = random.Random(1), []
        for model in (None, *ALWAYS, *SOMETIMES, "caption"):
            for n in range(6):
                words = " ".join(draw.choices(("what", "is", "this", "thing"), k=1 + 3 * n))
                image = encoded(drawing(30 + n, 9 + n), "PNG") if n % 3 else None
                self.questions.append(Question(model, words, image, (2, 9, 30)[n % 3]))
        for domain in ("plates", "scene", *MORE):  # asked without text
            images = [encoded(drawing(20 + n, 31), "PNG") for n in range(5)]
            self.questions += [Question(domain, "", image, 1) for image in images]

    def client(self):
        """A client of the server with a connection of its own."""
        options = {"headers": HEADERS, "timeout": 90, "trust_env": False, "verify": False}
        return httpx.Client(base_url=self.server.url, **options)

    @contextlib.contextmanager
    def served(self, policy, *arguments, **ending):
        """A server of the bundle, which lets adapters be loaded."""
        given = (
            self.bundle, "--base", self.base, "--allow-runtime-loading",
            "--adapter-folder", self.store, "--api-key", SECRET,
            "--state-file", self.folder / "state" / "served.json", "--policy", policy,
            "--dtype", "float32", "--device", "cpu", "--drain-seconds", 30, *arguments,
        )  # fmt: skip
        with served(*given, cwd=self.folder, **ending) as self.server:
            yield self.server

    def ask(self, question):
        """Ask alone; return what the answer says, with log probabilities."""
        chosen = {"logprobs": True, "top_logprobs": 2} if question.text else {}
        path, body = question.request(**chosen)
        with self.client() as client:
            return content_of(client.post(path, **body).raise_for_status())

    def change(self, name, load=True, path=None):
        """Load or unload an adapter, or a bundle by a domain's name; return the answer."""
        verb = "load" if load else "unload"
        if name not in MORE:
            path = {"lora_path": path or name} if load else {}
            return self.server.post(f"{verb}_lora_adapter", lora_name=name, **path)
        body = {"bundle_path": path or "more"} if load else {"bundle_name": "more"}
        return self.server.post(f"{verb}_bundle", **body)
