"""Correct programs that use the standard library in usual ways pass here as in the official harness.

What needs threads, processes, pipes, or files is refused; docs/sandbox.md gives the reasons.
"""

from dataclasses import replace

import pytest
from helpers.small_programs import passed_officially, split, verdicts
from helpers.tiers import TIERS, skip_unless_available

from lora_grpo import sandbox
from lora_grpo.sandbox import Settings

SECONDS = 5.0

ALLOWED = {
    "asyncio.run": """
import asyncio
async def g():
    return 1
def f():
    return asyncio.run(g()) == 1
""",
    "asyncio sleep": """
import asyncio
async def g():
    await asyncio.sleep(0.01)
    return 1
def f():
    return asyncio.run(g()) == 1
""",
    "asyncio gather": """
import asyncio
async def g(x):
    await asyncio.sleep(0.01 * (3 - x))
    return x
async def main():
    return await asyncio.gather(*map(g, range(3)))
def f():
    return asyncio.run(main()) == [0, 1, 2]
""",
    "asyncio queue": """
import asyncio
async def main():
    q = asyncio.Queue(2)
    async def put():
        for i in range(5):
            await q.put(i)
        await q.put(None)
    got = []
    t = asyncio.create_task(put())
    while (x := (await q.get())) is not None:
        got.append(x)
    await t
    return got
def f():
    return asyncio.run(main()) == [0, 1, 2, 3, 4]
""",
    "asyncio lock/event/semaphore": """
import asyncio
async def main():
    e = asyncio.Event()
    s = asyncio.Semaphore(1)
    l = asyncio.Lock()
    async def w():
        await e.wait()
        async with s, l:
            return 1
    t = [asyncio.create_task(w()) for _ in range(3)]
    await asyncio.sleep(0)
    e.set()
    return sum(await asyncio.gather(*t))
def f():
    return asyncio.run(main()) == 3
""",
    "asyncio wait_for timeout": """
import asyncio
async def main():
    try:
        await asyncio.wait_for(asyncio.sleep(5), 0.01)
    except asyncio.TimeoutError:
        return True
def f():
    return asyncio.run(main())
""",
    "asyncio timeout()": """
import asyncio
async def main():
    try:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(5)
    except TimeoutError:
        return True
def f():
    return asyncio.run(main())
""",
    "asyncio TaskGroup": """
import asyncio
async def g(x):
    return x
async def main():
    async with asyncio.TaskGroup() as tg:
        ts = [tg.create_task(g(i)) for i in range(3)]
    return [t.result() for t in ts]
def f():
    return asyncio.run(main()) == [0, 1, 2]
""",
    "asyncio as_completed": """
import asyncio
async def g(x):
    await asyncio.sleep(x / 100)
    return x
async def main():
    return [await t for t in asyncio.as_completed([g(2), g(0), g(1)])]
def f():
    return asyncio.run(main()) == [0, 1, 2]
""",
    "asyncio cancel": """
import asyncio
async def main():
    t = asyncio.create_task(asyncio.sleep(9))
    await asyncio.sleep(0)
    t.cancel()
    try:
        await t
    except asyncio.CancelledError:
        return t.cancelled()
def f():
    return asyncio.run(main())
""",
    "asyncio get_event_loop": """
import asyncio
async def g():
    return 1
def f():
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(g()) == 1
    finally:
        loop.close()
""",
    "asyncio set_event_loop": """
import asyncio
async def g():
    return 1
def f():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return asyncio.get_event_loop().run_until_complete(g()) == 1
""",
    "asyncio call_later": """
import asyncio
def f():
    loop = asyncio.new_event_loop()
    out = []
    loop.call_later(0.01, out.append, 1)
    loop.call_later(0.02, loop.stop)
    loop.run_forever()
    loop.close()
    return out == [1]
""",
    "asyncio Runner": """
import asyncio
async def g():
    return 1
def f():
    with asyncio.Runner() as r:
        return r.run(g()) + r.run(g()) == 2
""",
    "async generator": """
import asyncio
async def gen():
    for i in range(3):
        yield i
async def main():
    return [x async for x in gen()]
def f():
    return asyncio.run(main()) == [0, 1, 2]
""",
    "async context manager": """
import asyncio
import contextlib
@contextlib.asynccontextmanager
async def cm():
    yield 5
async def main():
    async with cm() as x:
        return x
def f():
    return asyncio.run(main()) == 5
""",
    "asyncio runs twice": """
import asyncio
async def g(x):
    await asyncio.sleep(0)
    return x
def f(x):
    return asyncio.run(g(x))
---
assert f(1) == 1 and f(2) == 2
""",
    "asyncio shield/wait": """
import asyncio
async def g(x):
    return x
async def main():
    tasks = [asyncio.create_task(g(1)), asyncio.create_task(asyncio.sleep(9))]
    d, p = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    [t.cancel() for t in p]
    return await asyncio.shield(g(2)) + d.pop().result()
def f():
    return asyncio.run(main()) == 3
""",
    "asyncio streams in memory": """
import asyncio
async def main():
    r = asyncio.StreamReader()
    r.feed_data(b'a\\nb')
    r.feed_eof()
    return await r.readline() + await r.read()
def f():
    return asyncio.run(main()) == b'a\\nb'
""",
    "asyncio contextvars": """
import asyncio
import contextvars
v = contextvars.ContextVar('v', default=0)
async def g(x):
    v.set(x)
    await asyncio.sleep(0)
    return v.get()
async def main():
    return await asyncio.gather(g(1), g(2))
def f():
    return asyncio.run(main()) == [1, 2]
""",
    "asyncio eventual exception": """
import asyncio
async def g():
    raise ValueError('x')
def f():
    try:
        asyncio.run(g())
    except ValueError as e:
        return str(e) == 'x'
""",
    "IsolatedAsyncioTestCase": """
import unittest
class T(unittest.IsolatedAsyncioTestCase):
    async def test(self):
        self.assertEqual(1, 1)
def f():
    r = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)
    return r.wasSuccessful() and r.testsRun == 1
""",
    "AsyncMock": """
import asyncio
from unittest.mock import AsyncMock
def f():
    return asyncio.run(AsyncMock(return_value=3)()) == 3
""",
    "tests await": """
import asyncio
async def f(x):
    await asyncio.sleep(0.01)
    return x + 1
---
import asyncio
assert asyncio.run(f(1)) == 2
""",
    "tests gather": """
async def f(x):
    return x + 1
---
import asyncio

async def main():
    return await asyncio.gather(f(1), f(2))
assert asyncio.run(main()) == [2, 3]
""",
    "tests loop": """
async def f(x):
    return x + 1
---
import asyncio
loop = asyncio.new_event_loop()
assert loop.run_until_complete(f(1)) == 2
loop.close()
""",
    "tests await raises": """
async def f(x):
    raise ValueError('no')
---
import asyncio
try:
    asyncio.run(f(1))
    assert False
except ValueError as e:
    assert str(e) == 'no'
""",
    "tests async for": """
async def f(n):
    for i in range(n):
        yield i
---
import asyncio

async def main():
    return [x async for x in f(3)]
assert asyncio.run(main()) == [0, 1, 2]
""",
    "locks without threads": """
import threading
def f():
    l = threading.RLock()
    e = threading.Event()
    e.set()
    c = threading.Condition()
    with l, c:
        c.notify_all()
    s = threading.Semaphore(2)
    s.acquire()
    return e.wait(1) and threading.current_thread() is threading.main_thread() and (threading.active_count() == 1)
""",
    "Future without threads": """
from concurrent.futures import Future
def f():
    u = Future()
    u.set_result(3)
    return u.result() == 3
""",
    "tempfile.TemporaryFile": """
import tempfile
def f():
    with tempfile.TemporaryFile() as t:
        t.write(b'a')
        t.seek(0)
        return t.read() == b'a'
""",
    "tempfile.TemporaryFile text": """
import tempfile
def f():
    with tempfile.TemporaryFile('w+') as t:
        t.write('a\\nb')
        t.seek(0)
        return t.readlines() == ['a\\n', 'b']
""",
    "SpooledTemporaryFile": """
import tempfile
def f():
    with tempfile.SpooledTemporaryFile(1000) as t:
        t.write(b'a')
        t.seek(0)
        return t.read() == b'a'
""",
    "sqlite3 memory": """
import sqlite3
def f():
    c = sqlite3.connect(':memory:')
    c.execute('create table t(a int, b text)')
    c.executemany('insert into t values(?, ?)', [(i, str(i)) for i in range(1000)])
    return c.execute('select sum(a), max(b) from t where a > ?', (1,)).fetchall() == [(499499, '999')]
""",
    "sqlite3 functions, rows, transactions": """
import sqlite3
def f():
    c = sqlite3.connect(':memory:')
    c.row_factory = sqlite3.Row
    c.create_function('twice', 1, lambda x: 2 * x)
    with c:
        c.execute('create table t(a primary key)')
        c.execute('insert into t values(1)')
    try:
        with c:
            c.execute('insert into t values(2)')
            c.execute('insert into t values(1)')
    except sqlite3.IntegrityError:
        pass
    rows = [tuple(r) for r in c.execute('select twice(a) from t order by a desc')]
    return rows == [(2,)] and list(c.iterdump())[0] == 'BEGIN TRANSACTION;'
""",
    "sqlite3 large sort": """
import sqlite3
def f():
    c = sqlite3.connect(':memory:')
    c.execute('create table t(a)')
    c.executemany('insert into t values(?)', [(i * 7919 % 100003,) for i in range(100000)])
    c.execute('create index i on t(a)')
    query = 'select count(*), min(a) from (select a from t order by a desc, random())'
    return c.execute(query).fetchone() == (100000, 0)
""",
    "sqlite3 shared memory name": """
import sqlite3
def f():
    a = sqlite3.connect('file:x?mode=memory&cache=shared', uri=True)
    a.execute('create table t(a)')
    a.commit()
    return sqlite3.connect('file:x?mode=memory&cache=shared', uri=True).execute('select * from t').fetchall() == []
""",
    "sqlite3 temporary": """
import sqlite3
def f():
    c = sqlite3.connect('')
    c.execute('create table t(a)')
    return c.execute('select * from t').fetchall() == []
""",
    "sqlite3 json, fts, backup": """
import sqlite3
def f():
    c = sqlite3.connect(':memory:')
    d = sqlite3.connect(':memory:')
    c.execute('create table t(a)')
    c.commit()
    c.backup(d)
    return d.execute("select json_extract('[1,2]', '$[1]')").fetchone() == (2,)
""",
    "ssl import": """
import ssl
def f():
    return ssl.OPENSSL_VERSION.startswith('OpenSSL') and ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).check_hostname
""",
    "ssl default context": """
import ssl
def f():
    return ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED
""",
    "ssl MemoryBIO": """
import ssl
def f():
    c = ssl.create_default_context()
    i, o = (ssl.MemoryBIO(), ssl.MemoryBIO())
    s = c.wrap_bio(i, o, server_hostname='a')
    try:
        s.do_handshake()
    except ssl.SSLWantReadError:
        return len(o.read()) > 100
""",
    "hashlib all": """
import hashlib
def f():
    names = [n for n in hashlib.algorithms_guaranteed if not n.startswith('shake')]
    return all(len(hashlib.new(n, b'a').hexdigest()) > 8 for n in names) and hashlib.shake_128(b'a').hexdigest(8)
""",
    "hashlib openssl": """
import hashlib
def f():
    return hashlib.new('sha512_256', b'a').hexdigest()[:4] == '455e'
""",
    "pbkdf2": """
import hashlib
def f():
    return len(hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100)) == 32
""",
    "scrypt": """
import hashlib
def f():
    return len(hashlib.scrypt(b'a', salt=b'b', n=16, r=8, p=1)) == 64
""",
    "hmac and secrets": """
import hmac, secrets
def f():
    digest = hmac.new(b'k', b'm', 'sha256').hexdigest()
    return len(digest) == 64 and hmac.compare_digest(b'a', b'a') and len(secrets.token_urlsafe()) > 30
""",
    "print surrogate": """
def f():
    print('\\ud800', '\\udcff', 'é')
    return True
""",
    "print surrogate to stderr": """
import sys
def f():
    print('\\ud800', file=sys.stderr)
    sys.stderr.write('\\udcff')
    return True
""",
    "stdout write surrogate": """
import sys
def f():
    sys.stdout.write('\\ud800\\n')
    sys.stdout.flush()
    return True
""",
    "pprint surrogate, warnings": """
import pprint, warnings
def f():
    pprint.pprint(['\\ud800'])
    warnings.warn('\\ud800')
    return True
""",
    "zoneinfo": """
from zoneinfo import ZoneInfo
from datetime import datetime
def f():
    return datetime(2024, 7, 1, tzinfo=ZoneInfo('America/New_York')).utcoffset().total_seconds() == -4 * 3600
""",
    "zoneinfo available": """
import zoneinfo
def f():
    return 'Europe/Berlin' in zoneinfo.available_timezones()
""",
    "zoneinfo missing": """
import zoneinfo
def f():
    try:
        zoneinfo.ZoneInfo('No/Such')
    except zoneinfo.ZoneInfoNotFoundError:
        return True
""",
    "zoneinfo conversion": """
from zoneinfo import ZoneInfo
from datetime import *
def f():
    noon = datetime(2024, 1, 1, 12, tzinfo=timezone.utc)
    return noon.astimezone(ZoneInfo('Asia/Kolkata')).strftime('%H:%M %Z') == '17:30 IST'
""",
    "Japanese codec": """
def f():
    return '日本'.encode('shift_jis').decode('shift_jis') == '日本' and len('日本'.encode('euc_jp')) == 4
""",
    "Chinese codec": """
def f():
    return '中文'.encode('gbk').decode('gb18030') == '中文' and '中'.encode('big5') == b'\\xa4\\xa4'
""",
    "Korean codec": """
def f():
    return '한국'.encode('euc_kr').decode('cp949') == '한국' and '한'.encode('iso2022_kr')
""",
    "cProfile": """
import cProfile, pstats, io
def f():
    p = cProfile.Profile()
    p.enable()
    sum([1])
    p.disable()
    pstats.Stats(p, stream=io.StringIO()).print_stats()
    return True
""",
}

REFUSED = {
    "asyncio.to_thread": """
import asyncio
async def main():
    return await asyncio.to_thread(sum, [1, 2])
def f():
    return asyncio.run(main()) == 3
""",
    "run_in_executor": """
import asyncio
async def main():
    return await asyncio.get_running_loop().run_in_executor(None, sum, [1, 2])
def f():
    return asyncio.run(main()) == 3
""",
    "Thread join": """
import threading
def f():
    x = []
    t = threading.Thread(target=x.append, args=(1,))
    t.start()
    t.join()
    return x == [1]
""",
    "threads and a lock": """
import threading
def f():
    n = [0]
    lock = threading.Lock()
    def w():
        for _ in range(100):
            with lock:
                n[0] += 1
    ts = [threading.Thread(target=w) for _ in range(5)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    return n[0] == 500
""",
    "thread local": """
import threading
def f():
    l = threading.local()
    l.x = 1
    seen = []
    t = threading.Thread(target=lambda: seen.append(hasattr(l, 'x')))
    t.start()
    t.join()
    return seen == [False] and l.x == 1
""",
    "ThreadPoolExecutor": """
from concurrent.futures import ThreadPoolExecutor
def f():
    with ThreadPoolExecutor(2) as p:
        return list(p.map(abs, [-1, 2])) == [1, 2]
""",
    "thread Timer": """
import threading
def f():
    x = []
    t = threading.Timer(0.01, x.append, (1,))
    t.start()
    t.join()
    return x == [1]
""",
    "producer and consumer": """
import threading
import queue
def f():
    q = queue.Queue()
    out = []
    def c():
        while (x := q.get()) is not None:
            out.append(x)
    t = threading.Thread(target=c)
    t.start()
    for i in range(3):
        q.put(i)
    q.put(None)
    t.join()
    return out == [0, 1, 2]
""",
    "ThreadPool of multiprocessing": """
from multiprocessing.pool import ThreadPool
def f():
    with ThreadPool(2) as p:
        return p.map(abs, [-1, 2]) == [1, 2]
""",
    "tempfile.NamedTemporaryFile": """
import tempfile
def f():
    with tempfile.NamedTemporaryFile('w+') as t:
        t.write('a')
        t.flush()
        return open(t.name).read() == 'a'
""",
    "write and read a file": """
def f():
    open('/tmp/xx_unusual', 'w').write('a')
    return open('/tmp/xx_unusual').read() == 'a'
""",
    "multiprocessing Lock": """
import multiprocessing
def f():
    with multiprocessing.Lock():
        return True
""",
    "shared_memory": """
from multiprocessing import shared_memory
def f():
    s = shared_memory.SharedMemory(create=True, size=10)
    s.unlink()
    s.close()
    return True
""",
    "socket pair": """
import socket
def f():
    a, b = socket.socketpair()
    a.send(b'x')
    return b.recv(1) == b'x'
""",
    "os.pipe": """
import os
def f():
    r, w = os.pipe()
    os.write(w, b'x')
    return os.read(r, 1) == b'x'
""",
}
"""Programs that pass officially and not here."""


@pytest.fixture(scope="module", params=TIERS)
def isolated(request):
    skip_unless_available(request.param)
    sandbox.start(Settings(timeout_seconds=SECONDS), request.param)
    yield
    sandbox.stop()


def test_programs_that_use_the_standard_library_pass(isolated):
    results = verdicts([program for _, program in split(ALLOWED)])
    assert {name: verdict for name, verdict in results.items() if not verdict.passed} == {}


def test_programs_that_need_more_than_their_process_are_refused(isolated):
    results = verdicts([program for _, program in split(REFUSED)])
    assert {verdict.status for verdict in results.values()} <= {"failed", "blocked"}, results


def test_both_tables_pass_officially():
    passed = passed_officially(ALLOWED | REFUSED, SECONDS)
    assert [name for name, is_passed in passed.items() if not is_passed] == []


def test_the_tests_are_real(isolated):
    wrong = "def f(*_, **__): return None"
    results = verdicts([replace(program, source=wrong) for _, program in split(ALLOWED)])
    assert [name for name, verdict in results.items() if verdict.passed] == []
