"""The metadata services of three clouds, as a machine there has them.

``python metadata_server.py FOLDER`` answers at the usual address, which must be one of
this host's. Each path that is asked for well is written to ``FOLDER/asked``; once
``FOLDER/taken`` is there, the machine is about to be taken.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ADDRESS = "169.254.169.254"
NAME = "vm-7"
EVENTS = [
    {"EventType": "Freeze", "Resources": [NAME], "NotBefore": ""},
    {"EventType": "Preempt", "Resources": ["vm-8"], "NotBefore": ""},
    {
        "EventType": "Preempt",
        "Resources": ["vm-6", NAME],
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    },
]


class Service(BaseHTTPRequestHandler):
    """Answers as EC2, Compute Engine and Azure do."""

    folder = Path()

    def do_PUT(self) -> None:
        """Give a token."""
        is_right = self.path == "/latest/api/token"
        is_right &= "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer(200 if is_right else 400, "the-token")

    def do_GET(self) -> None:
        """Say what is known of the machine."""
        is_taken = (self.folder / "taken").exists()
        status, text = 404, ""
        match self.path:
            case "/latest/meta-data/spot/instance-action":
                if self.headers["X-aws-ec2-metadata-token"] != "the-token":
                    status = 401
                elif is_taken:
                    status = 200
                    at = "2017-09-18T08:22:00Z"
                    text = json.dumps({"action": "terminate", "time": at})
            case "/computeMetadata/v1/instance/preempted":
                is_right = self.headers["Metadata-Flavor"] == "Google"
                status, text = 200 if is_right else 403, str(is_taken).upper()
            case "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                status = 200 if self.headers["Metadata"] == "true" else 400
                text = NAME
            case "/metadata/scheduledevents?api-version=2020-07-01":
                status = 200 if self.headers["Metadata"] == "true" else 400
                events = EVENTS if is_taken else EVENTS[:2]
                text = json.dumps({"DocumentIncarnation": 1, "Events": events})
        self.answer(status, text)

    def answer(self, status: int, text: str) -> None:
        """Send an answer; it is noted unless the question was wrong."""
        if status in (200, 404):
            with (self.folder / "asked").open("a") as asked:
                asked.write(f"{self.path}\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


if __name__ == "__main__":
    Service.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer((ADDRESS, 80), Service)
    print("listens", flush=True)  # noqa: T201
    server.serve_forever()
