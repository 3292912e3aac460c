#!/usr/bin/env python3
"""Cold prompts on clusters of one and of two worker processes, in turns, confined to the same two cores.

    cargo build --release && python3 tests/benches/cluster.py [--model DIR] [--rounds 10]

Every prompt is 16 segments of 512 random tokens and a query of 64. Worker i is pinned to core i; router and combiner run
on both. Printed: medians of the time to the first token and of its parts, and their ratio.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import urllib.request

CORES = [0, 1]


class Cluster:
    def __init__(self, program, model, workers):
        command = [program, "up", "--json", "--workers", str(workers), "--listen", "127.0.0.1:0"]
        command += ["--model", model] if model else []
        self.up = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, CORES),
        )
        core = iter(CORES)
        for line in self.up.stdout:
            event = json.loads(line)
            if event.get("role") == "scatter-worker" and "pid" in event and "event" not in event:
                pin(event["pid"], next(core))
            if "ready" in event:
                self.base = event["ready"]
                return
        raise SystemExit("the cluster did not become ready")

    def ask(self, segments, query):
        body = {"prompt": query, "max_tokens": 1, "temperature": 0, "hypic": {"segments": segments}}
        request = urllib.request.Request(
            self.base + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600) as response:
            return json.load(response)["hypic"]

    def stop(self):
        self.up.send_signal(signal.SIGTERM)
        self.up.wait()


def pin(pid, core):
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), [core])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--program", default="target/release/hypic")
    options.add_argument("--model")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--vocab", type=int, default=1700, help="random token ids are below this")
    given = options.parse_args()
    clusters = {workers: Cluster(given.program, given.model, workers) for workers in (1, 2)}
    draw = random.Random(7)
    tokens = lambda count: [draw.randrange(10, given.vocab) for _ in range(count)]
    times = {workers: {"first_token": [], "prefill": [], "compose": []} for workers in clusters}
    for round in range(given.rounds + 1):
        segments, query = [tokens(512) for _ in range(16)], tokens(64)
        for workers, cluster in clusters.items():
            told = cluster.ask(segments, query)
            cold = [s["source"] for s in told["segments"]]
            assert cold == ["computed"] * 16, cold
            # The first round warms up, and teaches the router the workers' speed.
            if round > 0:
                for part, values in times[workers].items():
                    values.append(told["timings_ms"][part])
    for cluster in clusters.values():
        cluster.stop()
    for workers, parts in times.items():
        medians = ", ".join(f"{part} {statistics.median(values):.1f} ms" for part, values in parts.items())
        print(f"{workers} worker(s): {medians} (medians of {given.rounds})")
    ratio = statistics.median(times[1]["first_token"]) / statistics.median(times[2]["first_token"])
    print(f"two workers against one: {ratio:.2f}x to the first token")


if __name__ == "__main__":
    main()
