"""A Hub that stands in for the real one: what huggingface_hub asks while it pushes, in memory, with faults on demand.

It counts every byte of every large file, and keeps each state that `main` was ever in.
"""

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
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub.utils.sha import git_hash

TOKEN = "hf_StandInTokenThatMustNeverBeSeen0000"
USER = "tester"
LARGE = (".safetensors", ".gguf")
NOW = "2026-01-01T00:00:00.000Z"


@dataclass
class Fault:
    """Something that goes wrong, a number of times."""

    method: str
    path: str
    """Expression that is searched for in the request's path."""
    do: str = "status"
    """`status`: answer with one. `cut`: close the connection in the middle of the body. `lose`: do what is asked and
    close the connection without an answer. `hold`: read half of the body, set `reached`, and wait to be released."""
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "no luck"
    times: int = 1
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class Change:
    """A pull request."""

    num: int
    title: str
    author: str
    base: dict[str, Any]
    status: str = "draft"


@dataclass
class Repository:
    private: bool
    refs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a ref -> path -> `bytes`, or the oid of a large file as `str`."""
    changes: list[Change] = field(default_factory=list)
    mains: list[dict[str, Any]] = field(default_factory=list)
    """Every state of main that there was."""
    commits: list[tuple[str, str]] = field(default_factory=list)
    """Ref and message of every commit."""

    def set(self, ref: str, tree: dict[str, Any]) -> None:
        self.refs[ref] = tree
        if ref == "main":
            self.mains.append(tree)

    def names(self, ref: str = "main") -> list[str]:
        return sorted(name for name in self.refs[ref] if name != ".gitattributes")


class HubStandIn:
    """The server. `url` is its HF_ENDPOINT."""

    def __init__(self, part_bytes: int | None = None) -> None:
        self.part_bytes = part_bytes
        """Size of the parts that a large file is asked for in; None asks for it whole."""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.received: Counter[str] = Counter()
        """Bytes of large files that came in, by oid, of broken requests too."""
        self.completed: Counter[str] = Counter()
        """How often a large file, or a part of it, came in whole, by oid."""
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.ignored: tuple[str, ...] = ()
        """Names that a .gitignore keeps out."""
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=lambda: self.server.serve_forever(poll_interval=0.01), daemon=True)
        self._thread.start()

    def close(self) -> None:
        for fault in self.faults:
            fault.released.set()
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, path: str, **how: Any) -> Fault:
        self.faults.append(Fault(method, path, **how))
        return self.faults[-1]

    def make(self, name: str, private: bool = True, **files: bytes) -> Repository:
        repository = self.repositories[name] = Repository(private)
        repository.set("main", {".gitattributes": b"*.safetensors filter=lfs\n", **files})
        return repository

    def content(self, name: str, path: str, ref: str = "main") -> bytes:
        found = self.repositories[name].refs[ref][path]
        return self.objects[found] if isinstance(found, str) else found

    def conflicts(self, repository: Repository, change: Change) -> list[str]:
        base, main, ours = change.base, repository.refs["main"], repository.refs[f"refs/pr/{change.num}"]
        paths = {*base, *main, *ours}
        return [
            path
            for path in sorted(paths)
            if base.get(path) != main.get(path) != ours.get(path) and ours.get(path) != base.get(path)
        ]

    def merge(self, repository: Repository, change: Change) -> None:
        base, ours = change.base, repository.refs[f"refs/pr/{change.num}"]
        merged = dict(repository.refs["main"])
        for path in {*base, *ours}:
            if base.get(path) != ours.get(path):
                merged.pop(path, None)
                if path in ours:
                    merged[path] = ours[path]
        repository.set("main", merged)
        change.status = "merged"


class _Cut(Exception):
    """The connection ends here."""


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One packet an answer: else each waits 40 ms for the acknowledgement of its first half.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_PUT = do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self) -> None:
            address = urlsplit(self.path)
            path = unquote(address.path)
            with hub.lock:
                hub.requests.append((self.command, path))
                fault = next(
                    (f for f in hub.faults if f.method == self.command and re.search(f.path, path) and f.times), None
                )
                if fault:
                    fault.times -= 1
            try:
                if fault and fault.do in ("cut", "hold"):
                    self._body(path, half=True)
                    fault.reached.set()
                    if fault.do == "hold":
                        fault.released.wait()
                    raise _Cut
                body = self._body(path)
                if fault and fault.do == "status":
                    return self._answer(fault.status, {"error": fault.message}, fault.headers)
                with hub.lock:
                    status, value, headers = _route(
                        hub, self.command, path, body, self.headers, parse_qs(address.query)
                    )
                if fault:
                    raise _Cut
                self._answer(status, value, headers)
            except (_Cut, ConnectionError):
                self.close_connection = True
                self.connection.close()

        def _body(self, path: str, half: bool = False) -> bytes:
            large = re.fullmatch(r"/lfs/(\w{64})(?:/part/\d+)?", path) if self.command == "PUT" else None
            length = int(self.headers.get("Content-Length") or 0)
            chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
            parts: list[bytes] = []
            wanted = length // 2 if half else length
            while chunked or wanted:
                if chunked:
                    size = int(self.rfile.readline().split(b";")[0], 16)
                    part = self.rfile.read(size)
                    self.rfile.readline()
                else:
                    part = self.rfile.read(min(wanted, 1 << 16))
                    wanted -= len(part)
                if large:
                    hub.received[large[1]] += len(part)
                parts.append(part)
                if not part or (chunked and half):
                    break
            return b"".join(parts)

        def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.wfile.flush()

    return Handler


Answer = tuple[int, Any, dict[str, str]]


def _route(hub: HubStandIn, method: str, path: str, body: bytes, headers: Any, query: dict[str, list[str]]) -> Answer:
    def ok(value: Any, **extra: str) -> Answer:
        return 200, value, {name.replace("_", "-"): text for name, text in extra.items()}

    def refuse(status: int, error: str, code: str = "") -> Answer:
        return status, {"error": error}, {"X-Error-Message": error, **({"X-Error-Code": code} if code else {})}

    if path == "/api/agent-harnesses":
        return ok({"standardEnvVars": [], "harnesses": {}})
    if path.startswith("/lfs/"):  # signed addresses: no token goes there
        return _large_file(hub, method, path, body, ok, refuse)
    if headers.get("Authorization") != f"Bearer {TOKEN}":
        return refuse(401, "Invalid credentials in Authorization header")
    if path == "/api/whoami-v2":
        return ok({"type": "user", "name": USER, "orgs": []})
    if path == "/api/validate-yaml":
        return ok({"errors": [], "warnings": []})
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization'] or USER}/{asked['name']}"
        if name in hub.repositories:
            return refuse(409, "You already created this model repo")
        hub.make(name, asked.get("visibility") == "private" or asked.get("private", False))
        return ok({"url": f"{hub.url}/{name}", "id": name})
    if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
        return ok(_batch(hub, json.loads(body)))
    if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", path):
        return ok(hub.content(found[1], found[2]))
    found = re.match(r"/api/models/([^/]+/[^/]+)(?:/(.*))?$", path)
    if not found or found[1] not in hub.repositories:
        return refuse(404, "Repository not found", "RepoNotFound")
    name, rest = found[1], found[2] or ""
    repository = hub.repositories[name]
    if not rest:
        return ok({"id": name, "modelId": name, "private": repository.private, "sha": "0" * 40, "siblings": []})
    if rest.startswith("tree/"):
        return ok(_tree(hub, repository.refs[rest.removeprefix("tree/")]))
    if rest.startswith("preupload/"):
        return ok({"files": [_mode(hub, repository.refs[rest.removeprefix("preupload/")], file)
                             for file in json.loads(body)["files"]]})  # fmt: skip
    if rest.startswith("commit/"):
        return _commit(hub, name, rest.removeprefix("commit/"), body, ok, refuse)
    if rest.startswith("discussions"):
        return _discussion(hub, name, method, rest, body, ok, refuse)
    return refuse(404, f"no such thing here: {path}")


def _large_file(hub: HubStandIn, method: str, path: str, body: bytes, ok: Any, refuse: Any) -> Answer:
    _, _, oid, *rest = path.split("/")
    if rest[:1] == ["verify"]:
        return ok({}) if oid in hub.objects else refuse(404, "not uploaded")
    if rest[:1] == ["part"]:
        hub.parts.setdefault(oid, {})[int(rest[1])] = body
        hub.completed[f"{oid}/{rest[1]}"] += 1
        return ok({}, ETag=f'"{rest[1]}"')
    if rest[:1] == ["complete"]:
        body = b"".join(hub.parts[oid][part["partNumber"]] for part in json.loads(body)["parts"])
    if hashlib.sha256(body).hexdigest() != oid:
        return refuse(400, "content and name differ")
    hub.objects[oid] = body
    hub.completed[oid] += 1
    return ok({})


def _batch(hub: HubStandIn, asked: dict[str, Any]) -> dict[str, Any]:
    objects = []
    for entry in asked["objects"]:
        answer = {"oid": entry["oid"], "size": entry["size"]}
        if entry["oid"] not in hub.objects:
            where = f"{hub.url}/lfs/{entry['oid']}"
            upload: dict[str, Any] = {"href": f"{where}?X-Amz-Signature=signed-and-secret"}
            if hub.part_bytes:
                count = -(-entry["size"] // hub.part_bytes)
                signed = {str(n): f"{where}/part/{n}?X-Amz-Signature=signed-and-secret" for n in range(1, count + 1)}
                upload = {"href": f"{where}/complete", "header": {"chunk_size": str(hub.part_bytes), **signed}}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{where}/verify"}}
        objects.append(answer)
    return {"transfer": "multipart" if hub.part_bytes else "basic", "objects": objects}


def _tree(hub: HubStandIn, tree: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for folder in sorted({path.rpartition("/")[0] for path in tree if "/" in path}):
        entries.append({"type": "directory", "path": folder, "oid": "0" * 40, "size": 0})
    for path, content in sorted(tree.items()):
        entry: dict[str, Any] = {"type": "file", "path": path}
        if isinstance(content, str):
            size = len(hub.objects[content])
            entry |= {"oid": "1" * 40, "size": size, "lfs": {"oid": content, "size": size, "pointerSize": 130}}
        else:
            entry |= {"oid": git_hash(content), "size": len(content)}
        entries.append(entry)
    return entries


def _mode(hub: HubStandIn, tree: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(LARGE)
    there = tree.get(file["path"])
    oid = there if isinstance(there, str) else git_hash(there) if there is not None else None
    mode = "lfs" if large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": file["path"] in hub.ignored, "oid": oid}


def _commit(hub: HubStandIn, name: str, ref: str, body: bytes, ok: Any, refuse: Any) -> Answer:
    repository = hub.repositories[name]
    if ref not in repository.refs:
        return refuse(404, "no such revision", "RevisionNotFound")
    tree, message = dict(repository.refs[ref]), ""
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            message = value["summary"]
        elif entry["key"] == "file":
            tree[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                return refuse(400, "large file was not uploaded")
            tree[value["path"]] = value["oid"]
        elif entry["key"] == "deletedFile" and tree.pop(value["path"], None) is None:
            return refuse(404, "A file with this name doesn't exist", "EntryNotFound")
    repository.set(ref, tree)
    repository.commits.append((ref, message))
    oid = f"{len(repository.commits):040x}"
    return ok({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})


def _discussion(hub: HubStandIn, name: str, method: str, rest: str, body: bytes, ok: Any, refuse: Any) -> Answer:
    repository = hub.repositories[name]
    numbers = re.fullmatch(r"discussions(?:/(\d+)(?:/(\w+))?)?", rest)
    assert numbers
    asked = json.loads(body) if body else {}
    if numbers[1] is None and method == "POST":
        change = Change(len(repository.changes) + 1, asked["title"], USER, repository.refs["main"])
        repository.changes.append(change)
        repository.refs[f"refs/pr/{change.num}"] = dict(repository.refs["main"])
        return ok({"num": change.num, "pullRequest": True, "url": f"{hub.url}/{name}/discussions/{change.num}"})
    if numbers[1] is None:
        shown = [_shown(name, change) for change in reversed(repository.changes)]
        return ok({"discussions": shown, "count": len(shown), "start": 0})
    change = repository.changes[int(numbers[1]) - 1]
    if numbers[2] == "status":
        change.status = asked["status"]
        data = {"status": change.status}
        event = {"id": "e", "type": "status-change", "createdAt": NOW, "author": {"name": USER}, "data": data}
        return ok({"newStatus": event})
    if numbers[2] == "merge":
        if change.status != "open":
            return refuse(400, f"a {change.status} pull request cannot be merged")
        if hub.conflicts(repository, change):
            return refuse(409, "there are conflicts")
        hub.merge(repository, change)
        return ok({})
    details = {"events": [], "filesWithConflicts": hub.conflicts(repository, change), "diff": ""}
    return ok(_shown(name, change) | details | {"changes": {"base": "refs/heads/main"}})


def _shown(name: str, change: Change) -> dict[str, Any]:
    return {
        "num": change.num,
        "title": change.title,
        "status": change.status,
        "author": {"name": change.author},
        "createdAt": NOW,
        "isPullRequest": True,
        "repo": {"name": name, "type": "model"},
    }
