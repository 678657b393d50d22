"""What a run does when its vLLM server ends or hangs; tests/with_vllm use a real vLLM."""

import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from trl.generation.vllm_client import VLLMClient

from opo_trl.generation.vllm_server import watched


ROOT = Path(__file__).parents[2]

# Waits in native code, which no exception reaches, like a broadcast over NCCL.
WAIT = """
import sys, threading, time
from opo_trl.generation import vllm_server
vllm_server.PERIOD, vllm_server.PATIENCE = 0.2, 1.0
if sys.argv[2] == "forever":
    vllm_server.ANSWER_LIMIT = 0.2
with vllm_server.watched(sys.argv[1]):
    if sys.argv[2] == "forever":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    time.sleep(1.6)
print("done", flush=True)
"""


class Server(BaseHTTPRequestHandler):
    """A server behind a proxy that asks for a password."""

    healthy = True

    def do_GET(self):
        if not self.healthy:
            time.sleep(60)
        known = self.headers["Authorization"] == f"Basic {b64encode(b'me:plainword').decode()}"
        self.send_response(200 if known else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    class Own(Server):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as served:
        served.daemon_threads = True
        served.block_on_close = False
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def url(server: ThreadingHTTPServer, user: str = "") -> str:
    return f"http://{user}127.0.0.1:{server.server_port}"


def wait(server: ThreadingHTTPServer, how_long: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WAIT, url(server, "me:plainword@"), how_long]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_server_that_hangs_ends_the_waiting_process(server):
    server.RequestHandlerClass.healthy = False
    done = wait(server, "forever")
    assert done.returncode == 1
    assert f"The vLLM server at {url(server, '<secret>@')} no longer answers" in done.stderr
    assert "plainword" not in done.stderr
    assert "`--resume_from_checkpoint last`" in done.stderr


def test_slow_but_healthy_server_is_waited_for(server):
    done = wait(server, "for some time")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_server_that_is_gone_is_named(server):
    address = url(server, "me:plainword@")
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match="no longer answers") as raised, watched(address):
        requests.get(f"{address}/v1/models")
    assert url(server, "<secret>@") in str(raised.value)
    assert isinstance(raised.value.__cause__, requests.ConnectionError)
    with pytest.raises(ZeroDivisionError), watched(address):  # not the server's fault
        _ = 1 / 0


def test_server_that_fails_is_named(server):
    def answer(self):
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"<html>")

    server.RequestHandlerClass.do_GET = server.RequestHandlerClass.do_POST = answer
    client = object.__new__(VLLMClient)  # vLLM need not be installed
    client.session, client.base_url, client.model = requests.Session(), url(server), "policy"
    with pytest.raises(RuntimeError, match=rf"The vLLM server at {url(server)} no longer"), watched(url(server)):
        client.generate([[1, 2]])
