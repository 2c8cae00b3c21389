"""A local server that answers what huggingface_hub requests during a push, in memory, with faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub.utils.sha import git_hash

TOKEN = "hf_StandInTokenThatMustNeverBeSeen0000"
USER = "tester"
SIGNATURE = "signed-and-secret"


@dataclass
class Fault:
    """What goes wrong with matching requests."""

    method: str
    path: str
    """Regular expression searched for in the request's path."""
    status: int | None = 503
    """Answer with this status; None reads half of the body and closes the connection."""
    message: str = "no luck"
    times: int = 1


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=list)
    """Messages of all commits."""
    card_data: Any = None
    """Front matter of the model card."""


class HubStandIn:
    """The server; `url` is its HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Uploaded large files by SHA-256."""
        self.uploads: Counter[str] = Counter()
        """How often each large file was uploaded completely."""
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=lambda: self.server.serve_forever(poll_interval=0.01), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, path: str, **how: Any) -> Fault:
        self.faults.append(Fault(method, path, **how))
        return self.faults[-1]

    def fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of a request, counting it."""
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path) and fault.times:
                fault.times -= 1
                return fault
        return None


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One packet an answer: otherwise each waits 40 ms for an acknowledgement.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            length = int(self.headers.get("Content-Length") or 0)
            with hub.lock:
                hub.requests.append((self.command, path))
                fault = hub.fault(self.command, path)
            if fault and fault.status is None:
                self.rfile.read(length // 2)
                self.close_connection = True
                self.connection.close()
                return
            body = self.rfile.read(length) if length else self._chunks()
            with hub.lock:
                if fault:
                    status, answer, headers = fault.status, {"error": fault.message}, {}
                else:
                    status, answer, headers = _route(hub, self.command, path, body, self.headers)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, text in headers.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.wfile.flush()

        do_POST = do_PUT = do_HEAD = do_GET

        def _chunks(self) -> bytes:
            parts = []
            while "chunked" in self.headers.get("Transfer-Encoding", ""):
                parts.append(self.rfile.read(int(self.rfile.readline(), 16)))
                self.rfile.readline()
                if not parts[-1]:
                    break
            return b"".join(parts)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


Answer = tuple[int, Any, dict[str, str]]


def _route(hub: HubStandIn, method: str, path: str, body: bytes, headers: Any) -> Answer:
    def refuse(status: int, error: str, code: str = "") -> Answer:
        return status, {"error": error}, {"X-Error-Message": error, "X-Error-Code": code}

    if path.startswith("/lfs/"):  # a signed URL, which takes no token
        oid = path.split("/")[2]
        if method == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return refuse(400, "content and name differ")
            hub.objects[oid] = body
            hub.uploads[oid] += 1
        return 200, {}, {}
    match = re.match(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/(\w+))?$", path)
    repository = hub.repositories.get(match[1]) if match else None
    is_public = method == "GET" and repository is not None and not repository.private
    if not is_public and headers.get("Authorization") != f"Bearer {TOKEN}":
        return refuse(401, "Invalid credentials in Authorization header")
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}, {}
    if path == "/api/repos/create":
        request = json.loads(body)
        name = f"{request['organization'] or USER}/{request['name']}"
        if name in hub.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, {}
        private = request.get("visibility") == "private" or request.get("private", False)
        hub.repositories[name] = Repository(private)
        return 200, {"url": f"{hub.url}/{name}", "id": name}, {}
    if path.endswith(".git/info/lfs/objects/batch"):
        return 200, {"transfer": "basic", "objects": [_upload(hub, entry) for entry in json.loads(body)["objects"]]}, {}
    if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        if file[1] not in hub.repositories:
            return refuse(404, "Repository not found", "RepoNotFound")
        if file[2] != "main":
            return refuse(404, "Invalid rev id", "RevisionNotFound")
        content = hub.repositories[file[1]].files.get(file[3])
        if content is None:
            return refuse(404, "Entry not found", "EntryNotFound")
        return 200, content, {"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": "0" * 40}
    if match is None or repository is None:
        return refuse(404, "Repository not found", "RepoNotFound")
    name = match[1]
    if match[2] == "preupload":
        return 200, {"files": [_mode(repository, file) for file in json.loads(body)["files"]]}, {}
    if match[2] == "commit":
        _commit(hub, repository, body)
        oid = f"{len(repository.commits):040x}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"}, {}
    siblings = [{"rfilename": path} for path in repository.files]
    info = {"id": name, "private": repository.private, "sha": "0" * 40, "siblings": siblings}
    return 200, info | {"cardData": repository.card_data}, {}


def _upload(hub: HubStandIn, entry: dict[str, Any]) -> dict[str, Any]:
    """Return where to upload a large file, unless the Hub already has it."""
    answer = {"oid": entry["oid"], "size": entry["size"]}
    if entry["oid"] not in hub.objects:
        url = f"{hub.url}/lfs/{entry['oid']}"
        answer["actions"] = {"upload": {"href": f"{url}?X-Sig={SIGNATURE}"}, "verify": {"href": f"{url}/verify"}}
    return answer


def _mode(repository: Repository, file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular"
    content = repository.files.get(file["path"])
    oid = None
    if content is not None:
        oid = hashlib.sha256(content).hexdigest() if mode == "lfs" else git_hash(content)
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}


def _commit(hub: HubStandIn, repository: Repository, body: bytes) -> None:
    files = dict(repository.files)
    for entry in map(json.loads, body.splitlines()):
        value = entry["value"]
        if entry["key"] == "header":
            repository.commits.append(value["summary"])
        elif entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
    repository.files = files
