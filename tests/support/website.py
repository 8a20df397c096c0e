"""A web server of a test's own."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Website(ThreadingHTTPServer):
    """Answers every request with what `answer(path, body)` gives; a context ends it.

    Attributes:
        seen: Path and headers of each request so far.
        url: Its address.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen, self.url = [], f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path, body):
        """Status, headers, and pieces of the body."""
        raise NotImplementedError

    def server_close(self):
        self.shutdown()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, headers, pieces = self.server.answer(self.path, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has what it wanted
            for piece in pieces if self.command != "HEAD" else ():
                self.wfile.write(piece)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass
