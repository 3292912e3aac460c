"""`hypic serve` as a subprocess on free loopback ports."""

import collections
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
BINARY = Path(os.environ.get("HYPIC_BIN") or TARGET / "release" / "hypic")

START_S = 60  # until the addresses are printed and /ready says so
STOP_S = 30  # from SIGTERM to the end of the process
IDLE_S = 5  # from the last answer or cancellation until the server does nothing
IDLE_SAMPLE_S = 0.3
IDLE_LOAD = 0.1  # of one core
LOG_LINES = 200  # kept for the report of a failure

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ADDRESSES = {
    "http": re.compile(r"^\W*http\s+http://([^\s/]+:\d+)"),
    "grpc": re.compile(r"^\W*grpc\s+(?:http://)?([^\s/]+:\d+)"),
}


class Server:
    """A running server: `http` is its base URL, `grpc` its host and port."""

    def __init__(self, *arguments):
        if not BINARY.is_file():
            raise FileNotFoundError(f"{BINARY}: build it (cargo build --release -p hypic) or set HYPIC_BIN")
        command = [str(BINARY), "serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", *arguments]
        self.log = collections.deque(maxlen=LOG_LINES)
        self._addresses = {}
        self._printed = threading.Event()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _read(self):
        for line in self.process.stdout:
            line = ESCAPES.sub("", line.rstrip("\n"))
            self.log.append(line)
            for name, pattern in ADDRESSES.items():
                match = pattern.search(line)
                if match:
                    self._addresses.setdefault(name, match[1])
            if len(self._addresses) == len(ADDRESSES):
                self._printed.set()
        self._printed.set()

    def _wait_until_ready(self):
        deadline = time.monotonic() + START_S
        self._printed.wait(START_S)
        missing = ADDRESSES.keys() - self._addresses.keys()
        assert not missing, f"no line with the address of {sorted(missing)}:\n{self.tail()}"
        self.http = f"http://{self._addresses['http']}"
        self.grpc = self._addresses["grpc"]
        while self.get("/ready")[0] != 200:
            assert time.monotonic() < deadline, f"not ready after {START_S} s:\n{self.tail()}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.tail()}"
            time.sleep(0.05)

    def tail(self):
        return "\n".join(self.log)

    def request(self, path, data=None, headers=None):
        """A response to read from, errors included; with `data` a POST of JSON."""
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.http + path, data=data, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=START_S)
        except urllib.error.HTTPError as error:
            return error

    def get(self, path, **headers):
        """Status and body; status 0 if nobody answers."""
        try:
            with self.request(path, headers=headers) as response:
                return response.status, response.read().decode()
        except OSError as error:
            return 0, str(error)

    def wait_until_idle(self):
        """Work that nobody waits for any more must end: the process stops using the CPU."""
        deadline = time.monotonic() + IDLE_S
        used, at = self._cpu_s(), time.monotonic()
        while True:
            time.sleep(IDLE_SAMPLE_S)
            used_before, before = used, at
            used, at = self._cpu_s(), time.monotonic()
            load = (used - used_before) / (at - before)
            if load < IDLE_LOAD:
                return
            assert at < deadline, f"{load:.0%} of a core is still in use"

    def _cpu_s(self):
        # The fields after the program's name, which is in brackets: user and system time are the 14th and 15th of all.
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """The exit code."""
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still there {STOP_S} s after SIGTERM:\n{self.tail()}") from None
        self._reader.join(STOP_S)
        return code

    def stop(self):
        """SIGTERM; everything must be given back and the exit code be 0."""
        self.terminate()
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.tail()}"

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
