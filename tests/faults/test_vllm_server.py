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
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.generation.vllm_client import VLLMClient as SynchronousClient

from opo_trl import OPOConfig
from opo_trl.rollout.vllm_server import status, watched, without_password


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
    """A server behind a proxy that asks for a password, and that knows no route with two slashes."""

    healthy, users, path_of_health = True, (None, f"Basic {b64encode(b'me:plainword').decode()}"), "/health"

    def do_GET(self):
        if not self.healthy:
            time.sleep(60)
        known = self.requestline.split()[1] == self.path_of_health
        self.send_response(200 if known and self.headers["Authorization"] in self.users else 404)
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


@pytest.mark.parametrize(
    ("code", "location", "body", "said"),
    [
        (400, None, "<html>", "Exception: Request failed: 400, <html>"),
        (200, None, "{}", "KeyError: 'choices'"),
        (302, "/", "", "TooManyRedir"),
    ],
)
def test_server_that_fails_is_named_with_its_answer(server, code, location, body, said):
    def answer(self):
        self.send_response(code)
        self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body.encode())

    server.RequestHandlerClass.do_GET = server.RequestHandlerClass.do_POST = answer
    client = object.__new__(SynchronousClient)  # vLLM need not be installed
    client.session, client.base_url, client.model = requests.Session(), url(server), "policy"
    message = rf"The vLLM server at {url(server)} no longer answers as it should \(last: {said}"
    with pytest.raises(RuntimeError, match=message), watched(url(server)):
        client.generate([[1, 2]])


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (302, ("Location", "/health")),
        (302, ("Location", "ftp://\x1b[2J")),
        (200, ("Transfer-Encoding", "chunked")),
    ],
)
def test_answer_that_cannot_be_read_is_an_answer_too(server, code, header):
    """An error would end the thread that watches a server, and a process that waits for it would wait forever."""

    def answer(self):
        self.send_response(code)
        self.send_header(*header)
        self.end_headers()

    server.RequestHandlerClass.do_GET = answer
    said = status(url(server))
    assert isinstance(said, str)
    assert said.isprintable()
    assert said != 200


# Addresses


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("http://127.0.0.1:{}/", "/health"),
        ("http://me:plainword@127.0.0.1:{}/", "/health"),
        ("http://127.0.0.1:{}/behind/a/proxy/", "/behind/a/proxy/health"),
    ],
)
def test_address_that_trl_takes_is_waited_for(server, tmp_path, address, path):
    server.RequestHandlerClass.path_of_health = path
    address = address.format(server.server_port)
    args = OPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", vllm_server_base_url=address)
    VLLMClient(args.vllm_server_base_url, 0.0).wait_for_server_ready()


def test_errors_of_trl_do_not_print_the_password(server):
    server.RequestHandlerClass.users = ()
    address = url(server, "me:plainword@")
    with pytest.raises(RuntimeError, match=r"404 .* http://\*\*\*@127") as raised, without_password(address):
        VLLMClient(address).get_server_info()
    assert raised.value.__suppress_context__
    with pytest.raises(KeyError), without_password(address):
        raise KeyError
