"""Which ranks are there, late or gone: ranks meet in torch's store, and a thread in each of them watches the others.

A collective that waits for a missing rank prints nothing, or a page of torch's. Here each rank writes its stage to the
store. The thread runs while the main one waits inside a collective; it names the missing rank in one line, and ends
this rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gearbox import processes
from gearbox.launch import outcome
from gearbox.launch.environment import LaunchEnvironment

T = TypeVar("T")

THREAD = "rank registry"
LOOK_SECONDS = 0.25
STILL_SECONDS = 2.5  # a rank whose thread has written nothing for so long is dead or stopped: ten looks
WAITS = "waits"
GRACE_SECONDS = 30.0  # beyond the timeout, until a collective gives up by itself


class RankRegistry:
    """The ranks of this launch. Every rank makes one, and makes the same calls of `enter_stage` and `gather`."""

    def __init__(self, timeout: float, on_loss: Callable[[str, bool], None]) -> None:
        """Join the store. Each rank calls `on_loss(line, speaks)`, in any thread, before it ends; one prints."""
        self._launched = LaunchEnvironment.read()
        self.rank, self.size = self._launched.rank, self._launched.size
        self.local_rank, self.local_size = self._launched.local_rank, self._launched.local_size
        self.timeout, self.on_loss = timeout, on_loss
        self.hosts: dict[int, str] = {}
        self._number, self._beats, self._stage, self._began = 0, 0, "start", time.monotonic()
        self._waits_for_all = True
        self._siblings: dict[int, psutil.Process] = {}
        self._ending = threading.RLock()
        self.store = self._join()
        self._own = self.store
        self._wakeup = -1
        if self.size > 1:
            self._own = self._join()  # a client answers one call at a time, and the main thread may be in one
            self._listen()
            threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def _join(self) -> Store:
        if self.size == 1:
            return HashStore()
        host, port = self._launched.store_host, self._launched.store_port
        is_master = self.rank == 0 and not self._launched.agent_has_store and not hasattr(self, "store")
        timeout = timedelta(seconds=self.timeout)
        try:
            store = TCPStore(
                host, port, is_master=is_master, wait_for_workers=False, multi_tenant=True, timeout=timeout
            )
        except RuntimeError:  # torch's DistNetworkError is one
            line = (
                f"rank 0's store at {host}:{port} (MASTER_ADDR, MASTER_PORT) does not answer rank {self.rank} "
                f"({socket.gethostname()}) within {self.timeout:g} s"
            )
            self.on_loss(line, self.local_rank == 0)
            os._exit(outcome.EXIT_CRASHED)
        # A restart by the launcher joins the same store.
        return PrefixStore(f"doctor/{self._launched.restart_count}", store)

    def check_in(self) -> None:
        """Wait for every rank. Afterwards their hosts are known, and a dead one of this machine is seen at once."""
        placed: list[tuple[str, int]] = self.gather("check-in", (socket.gethostname(), os.getpid()))
        self.hosts = {rank: host for rank, (host, _) in enumerate(placed)}
        for rank, (host, pid) in enumerate(placed):
            if host == socket.gethostname() and rank != self.rank and psutil.pid_exists(pid):
                self._siblings[rank] = psutil.Process(pid)

    def join_process_group(self, device: torch.device) -> None:
        """Join torch's process group of all ranks: NCCL's on GPUs, gloo's on the CPU."""
        self.enter_stage("the process group")
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout + GRACE_SECONDS),
            device_id=device if is_gpu else None,
        )

    def enter_stage(self, stage: str) -> None:
        """Note what this rank does now. All ranks enter the same stages, so that the late one can be named."""
        self._number += 1
        self._stage, self._began = stage, time.monotonic()
        self.store.set(f"at/{self.rank}", f"{self._number} {stage}")

    def gather(self, name: str, value: T) -> list[T]:
        """Return the value of each rank, by rank, on every rank. Each call needs another name.

        Values go through JSON: tuples come back as lists.
        """
        self.enter_stage(name)
        self.store.set(f"{name}/{self.rank}", json.dumps([socket.gethostname(), value]))
        if self.store.add(f"{name}/count", 1) == self.size:
            self.store.set(f"{name}/all", "1")
        wait = 0.002
        while not self.store.check([f"{name}/all"]):
            time.sleep(wait)
            wait = min(0.1, wait * 1.5)  # the thread watches the time
        return [json.loads(self.store.get(f"{name}/{rank}"))[1] for rank in range(self.size)]

    def leave(self) -> None:
        """Watch no rank any more. The rank that may hold the store leaves last."""
        with self._ending:  # the thread looks no more
            self._waits_for_all = False
        self.store.set(f"left/{self.rank}", "1")
        self.store.add("left", 1)
        deadline = time.monotonic() + self.timeout
        while self.rank == 0 and self.store.add("left", 0) < self.size and time.monotonic() < deadline:
            time.sleep(0.01)

    def fail(self, error: Exception) -> NoReturn:
        """End this rank after an error: its own, or one that follows from another rank's death, which is then named."""
        if self.size > 1:
            time.sleep(2 * LOOK_SECONDS)  # the thread may see a dead neighbour, and end this rank
            with suppress(RuntimeError):
                if silent := self._silent():
                    self._end(self._gone(silent))
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._end(f"rank {self.rank} ({socket.gethostname()}) failed in {self._stage}: {first_line[:200]}")

    def _listen(self) -> None:
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the thread is woken, and decides
        if self._launched.is_elastic:
            processes.die_with_parent(signal.SIGTERM)  # each rank has its own session

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], LOOK_SECONDS)
            for number in os.read(self._wakeup, 64) if ready else b"":
                self._stop(number)
            with self._ending:
                if not self._waits_for_all:
                    continue
            if dead := self._dead_here():
                self._end(self._gone(dead))
            try:
                self._beat()
                if time.monotonic() - self._began > self.timeout:
                    self._end(self._late())
            except RuntimeError:  # of the store
                self._end(f"rank 0's store at {self._launched.store_host} is gone: the launcher there has ended")

    def _stop(self, number: int) -> None:
        """The launcher sends SIGTERM when a rank has died; so does a person who has had enough."""
        if number == signal.SIGINT:
            os._exit(outcome.EXIT_INTERRUPTED)
        if self._waits_for_all:
            deadline = time.monotonic() + 2 * LOOK_SECONDS
            while time.monotonic() < deadline:
                if dead := self._dead_here():
                    self._end(self._gone(dead))
                time.sleep(LOOK_SECONDS / 10)
        os._exit(outcome.EXIT_CRASHED)

    def _dead_here(self) -> list[int]:
        """Return the ranks of this machine that have died before they left."""
        dead = [rank for rank, process in list(self._siblings.items()) if not processes.is_alive(process)]
        with suppress(RuntimeError):
            return [rank for rank in dead if not self._client().check([f"left/{rank}"])]
        return dead

    def _beat(self) -> None:
        self._beats += 1
        self._own.set(f"beat/{self.rank}", f"{self._beats} {_doing()}")

    def _silent(self) -> list[int]:
        """Return the ranks whose thread writes nothing any more: dead, stopped, or their machine is gone."""
        before = self._read("beat")
        deadline = time.monotonic() + STILL_SECONDS
        while time.monotonic() < deadline:
            if threading.current_thread() is not threading.main_thread():
                self._beat()  # another rank's thread may be looking just now, for the same reason
            time.sleep(LOOK_SECONDS)
        after = self._read("beat")
        return [rank for rank in range(self.size) if rank != self.rank and before[rank] == after[rank]]

    def _late(self) -> str:
        """Describe which ranks keep the others waiting: those that are absent, silent, behind or busy."""
        at = self._read("at")
        absent = [rank for rank, text in enumerate(at) if text is None]
        if absent:
            return f"{self._ranks(absent)} did not come within {self.timeout:g} s"
        if silent := self._silent():
            return (
                f"{self._ranks(silent)} {_do(silent)} not answer: dead, stopped, or cut off, in {_stage(at[silent[0]])}"
            )
        steps = [int(str(text).partition(" ")[0]) for text in at]
        late = [rank for rank, step in enumerate(steps) if step == min(steps)]
        if len(late) < self.size:
            ahead = _stage(at[steps.index(max(steps))])
            return (
                f"{self._ranks(late)} did not come to {ahead} within {self.timeout:g} s, still in {_stage(at[late[0]])}"
            )
        doing = [str(text).partition(" ")[2] for text in self._read("beat")]
        busy = [rank for rank, text in enumerate(doing) if text != WAITS]
        if busy and len(busy) < self.size:
            return (
                f"{self._ranks(busy)} {_do(busy)} not take part in {self._stage} for {self.timeout:g} s, in "
                f"{doing[busy[0]]}"
            )
        return (
            f"all ranks are in {self._stage}, and it does not end within {self.timeout:g} s: no rank is late, the "
            "network between them does not carry it"
        )

    def _gone(self, ranks: list[int]) -> str:
        try:
            where = f" in {_stage(self._read('at')[ranks[0]])}"
        except RuntimeError:  # the store is gone with it
            where = ""
        return f"{self._ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} died{where}"

    def _read(self, key: str) -> list[str | None]:
        """Return the value of each rank, None where it has never written one."""
        store = self._client()
        names = [f"{key}/{rank}" for rank in range(self.size)]
        return [store.get(name).decode() if store.check([name]) else None for name in names]

    def _ranks(self, ranks: list[int]) -> str:
        """Return `rank 3 (node2)` or `ranks 4, 5 (node3)`. A rank that never came has the host of its neighbours."""
        hosts = dict.fromkeys(self._host(rank) for rank in ranks)
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return f"rank{'s' if len(ranks) > 1 else ''} {shown} ({', '.join(hosts)})"

    def _host(self, rank: int) -> str:
        if rank in self.hosts:
            return self.hosts[rank]
        machine = rank // self.local_size
        for other in range(machine * self.local_size, min(self.size, (machine + 1) * self.local_size)):
            if self._client().check([f"check-in/{other}"]):
                return str(json.loads(self._client().get(f"check-in/{other}"))[0])
        return f"machine {machine}, of which no rank came"

    def _client(self) -> Store:
        return self._own if threading.current_thread().name == THREAD else self.store

    def _end(self, line: str) -> NoReturn:
        """Print the line once in the world, write it on each machine, and end this rank."""
        with self._ending:
            if self._waits_for_all:
                try:
                    speaks = self._client().add("spoken", 1) == 1
                    if speaks:
                        self._client().set("said", line)
                    elif self._client().check(["said"]):
                        line = self._client().get("said").decode()
                except RuntimeError:
                    speaks = self.local_rank == 0
                self.on_loss(line, speaks)
            os._exit(outcome.EXIT_CRASHED)


def _doing() -> str:
    """Return WAITS where the main thread waits inside a collective or for the GPU, else its line of code."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    code = frame.f_code
    path = Path(code.co_filename)
    if ({"distributed", "cuda"} & {*path.parts} and "torch" in path.parts) or code.co_name == "_exchange":
        return WAITS
    return f"{code.co_name} ({path.name}:{frame.f_lineno})"


def _do(ranks: list[int]) -> str:
    return "do" if len(ranks) > 1 else "does"


def _stage(text: str | None) -> str:
    return (text or "0 start").partition(" ")[2]
