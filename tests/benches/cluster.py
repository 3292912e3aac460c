#!/usr/bin/env python3
"""Cold prompts on real clusters of processes: what a second worker brings, and what a lost one costs.

    cargo build --release && python3 tests/benches/cluster.py [speedup|kill] [--model DIR] [--rounds 10]

Without --model the demo model is served; tests/benches/random_model.py writes a larger one. All processes of all
clusters are confined to the first two cores, the clusters take turns with the same requests, and medians are printed.
Nothing else should run on the machine.

speedup: 16 segments of 512 random tokens and a query of 64, on one worker and on two. Worker i is pinned to core i;
router and combiner run on both. Printed beside the times to the first token: the share of the processor time that was
not the workers', and the share of the bytes of computed entries that were on their way before the computation ended.

kill: 4 segments of equal length on 4 workers, undisturbed and with one worker killed when about half of its segment is
done. Printed: the median of the extra time, and as a multiple of the time that one segment takes its worker alone. The
worker that is killed is replaced by a new cluster, so that every round begins alike.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time
import urllib.parse

CORES = [0, 1]
TICKS = os.sysconf("SC_CLK_TCK")


class Cluster:
    def __init__(self, given, workers):
        command = [given.program, "up", "--json", "--workers", str(workers), "--listen", "127.0.0.1:0"]
        command += ["--model", given.model] if given.model else []
        # Nothing may be evicted: the rounds' entries all stay.
        command += ["--set", f"cache.bytes={given.cache}"]
        self.up = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, CORES),
        )
        self.workers, self.others, self.router = {}, [], None
        for line in self.up.stdout:
            event = json.loads(line)
            if "pid" in event and "event" not in event:
                if event["role"] == "scatter-worker":
                    pin(event["pid"], CORES[len(self.workers) % len(CORES)])
                    self.workers[event["id"]] = event["pid"]
                else:
                    self.others.append(event["pid"])
                if event["role"] == "router":
                    self.router = event["metrics"]
            if "ready" in event:
                self.address = urllib.parse.urlsplit(event["ready"]).netloc
                return
        raise SystemExit("the cluster did not become ready")

    def ask(self, segments, query):
        body = {"prompt": query, "max_tokens": 1, "temperature": 0, "hypic": {"segments": segments}}
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.load(response)
        assert response.status == 200, answer
        return answer["hypic"]

    def busy(self, pids):
        """Seconds of processor time that these processes have had."""
        return sum(processor_time(pid) for pid in pids)

    def hidden(self):
        """Sum and count of the shares of transfers that were hidden."""
        connection = http.client.HTTPConnection(self.router, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        values = {"sum": 0.0, "count": 0.0}
        for line in text.splitlines():
            for key in values:
                if line.startswith(f"hypic_transfer_hidden_ratio_{key}"):
                    values[key] += float(line.rsplit(" ", 1)[1])
        return values["sum"], values["count"]

    def stop(self):
        self.up.send_signal(signal.SIGTERM)
        self.up.wait()


def pin(pid, core):
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), [core])


def processor_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cold(told, count):
    sources = [segment["source"] for segment in told["segments"]]
    assert sources == ["computed"] * count, sources
    return told


def speedup(given, tokens):
    clusters = {workers: Cluster(given, workers) for workers in (1, 2)}
    parts = ("first_token", "prefill", "compose")
    times = {workers: {part: [] for part in parts} for workers in clusters}
    shares = {workers: [0.0, 0.0] for workers in clusters}
    begun = {}
    for round in range(given.rounds + 1):
        segments, query = [tokens(512) for _ in range(16)], tokens(64)
        for workers, cluster in clusters.items():
            pids = list(cluster.workers.values())
            before = cluster.busy(pids), cluster.busy(cluster.others)
            told = cold(cluster.ask(segments, query), 16)
            # The first round warms up, and teaches the router the workers' speed.
            if round == 0:
                begun[workers] = cluster.hidden()
                continue
            for part in parts:
                times[workers][part].append(told["timings_ms"][part])
            shares[workers][0] += cluster.busy(pids) - before[0]
            shares[workers][1] += cluster.busy(cluster.others) - before[1]
    for workers, cluster in clusters.items():
        medians = ", ".join(f"{part} {statistics.median(values):.1f} ms" for part, values in times[workers].items())
        own, other = shares[workers]
        total, count = (now - then for now, then in zip(cluster.hidden(), begun[workers]))
        cluster.stop()
        print(f"{workers} worker(s): {medians} (medians of {given.rounds})")
        hidden = f"{total / count:.1%} of the bytes of {count:.0f} transfers" if count else "no transfers"
        print(f"  processor time of router and combiner: {other / (own + other):.1%}; hidden: {hidden}")
    ratio = statistics.median(times[1]["first_token"]) / statistics.median(times[2]["first_token"])
    print(f"two workers against one: {ratio:.2f}x to the first token")


def kill(given, tokens):
    alone, whole, hit, own_among = [], [], [], []
    for round in range(given.rounds):
        cluster = Cluster(given, 4)
        # The first requests warm up, and teach the router the workers' speed.
        for _ in range(2):
            cluster.ask([tokens(given.length) for _ in range(4)], tokens(64))
        alone.append(cluster.ask([tokens(given.length)], tokens(64))["timings_ms"]["prefill"])
        query = tokens(64)
        told = cold(cluster.ask([tokens(given.length) for _ in range(4)], query), 4)
        whole.append(told["timings_ms"]["first_token"])
        own_among.append(told["timings_ms"]["prefill"])
        victim = random.Random(round).choice(sorted(cluster.workers))
        after = told["timings_ms"]["prefill"] / 2000
        killer = threading.Thread(target=lambda: (time.sleep(after), os.kill(cluster.workers[victim], signal.SIGKILL)))
        killer.start()
        told = cluster.ask([tokens(given.length) for _ in range(4)], query)
        killer.join()
        assert victim not in [segment["worker"] for segment in told["segments"]], "it was killed too late"
        hit.append(told["timings_ms"]["first_token"])
        cluster.stop()
    extra = [b - a for a, b in zip(whole, hit)]
    own, among, median = statistics.median(alone), statistics.median(own_among), statistics.median(extra)
    print(f"a segment of {given.length} tokens takes its worker {own:.1f} ms alone, {among:.1f} ms with 4 at a time")
    print(f"to the first token, undisturbed: {statistics.median(whole):.1f} ms (medians of {given.rounds})")
    print(f"one killed halfway: {median:.1f} ms more, {median / own:.2f} and {median / among:.2f} times the segment's own")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=["speedup", "kill"], default="speedup")
    options.add_argument("--program", default="target/release/hypic")
    options.add_argument("--model")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--vocab", type=int, default=1700, help="random token ids are below this")
    options.add_argument("--length", type=int, default=2048, help="tokens of each segment of `kill`")
    options.add_argument("--cache", default="4GiB", help="memory of each worker and combiner for entries")
    given = options.parse_args()
    draw = random.Random(7)
    tokens = lambda count: [draw.randrange(10, given.vocab) for _ in range(count)]
    {"speedup": speedup, "kill": kill}[given.what](given, tokens)


if __name__ == "__main__":
    main()
