"""What a run does when its vLLM server ends or hangs; tests/with_vllm use a real vLLM."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from opo_trl.rollout.vllm_server import watched


ROOT = Path(__file__).parents[2]

# Waits in native code, which no exception reaches, like a broadcast over NCCL.
WAIT = """
import sys, threading, time
from opo_trl.rollout import vllm_server
vllm_server.PERIOD, vllm_server.PATIENCE = 0.2, 1.0
with vllm_server.watched(sys.argv[1]):
    if sys.argv[2] == "forever":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    time.sleep(3)
print("done", flush=True)
"""


class Server(BaseHTTPRequestHandler):
    healthy = True

    def do_GET(self):
        if not self.healthy:
            time.sleep(60)
        self.send_response(200)
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


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def wait(server: ThreadingHTTPServer, how_long: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WAIT, url(server), how_long]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_server_that_hangs_ends_the_waiting_process(server):
    server.RequestHandlerClass.healthy = False
    done = wait(server, "forever")
    assert done.returncode == 1
    assert f"The vLLM server at {url(server)} no longer answers" in done.stderr
    assert "`--resume_from_checkpoint last`" in done.stderr


def test_slow_but_healthy_server_is_waited_for(server):
    done = wait(server, "for some time")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_server_that_is_gone_is_named(server):
    address = url(server)
    server.shutdown()
    server.server_close()
    with (
        pytest.raises(RuntimeError, match=rf"The vLLM server at {address} no longer answers") as raised,
        watched(address),
    ):
        urlopen(f"{address}/v1/models")
    assert isinstance(raised.value.__cause__, URLError)
    with pytest.raises(ZeroDivisionError), watched(address):  # not the server's fault
        _ = 1 / 0
