# SPDX-License-Identifier: Apache-2.0
"""The controller (in rank 0) and the processor of each rank, over a store: what the C++ part of MindIO TFT does."""

from __future__ import annotations

import json
import os
import threading
import time

POLL_SECONDS = 0.003
REPLY_SECONDS = 15
OK, FAILED, AGAIN = 0, 1, 3
NO_LIMIT = 2**62
PAUSED = ("RS_NORMAL", "RS_PREREPAIR_FINISH")


class Processor:
    def __init__(self, tft, rank, stores, controller=None):
        self.tft, self.rank = tft, rank
        self.force = False
        self.repair_type = "unknow"
        self._store, self._status_store = stores(), stores()
        self._status_lock = threading.Lock()
        self._status = {"step": 0, "data": "updated", "replicas": []}
        self._limit = NO_LIMIT
        self._failed = False
        self._epoch = self._number = self.repair_id = 0
        self._wait = threading.Semaphore(0)
        self._go = False
        self._left = threading.Event()
        self._closed = threading.Event()
        self._controller = controller

    def start(self):
        if self._store.check(
            [f"tft/awaited/{self.rank}"]
        ):  # the controller answers the register message of a new process
            self._epoch, self._number = json.loads(self._store.get(f"tft/awaited/{self.rank}"))
            self.repair_id = self._epoch + 1
        self._publish()
        if self._controller is not None:
            self._controller.start()
        threading.Thread(target=self._run, name="tft", daemon=True).start()

    def close(self):
        self._closed.set()
        if self._controller is not None:
            self._controller.closed.set()

    # ---- training thread

    def set_replicas(self, info):
        self._status["replicas"] = info
        self._publish()

    def begin_updating(self):
        updating = False
        while not updating:
            if self.force:
                self.force = False
                raise RuntimeError("FORCE STOP. By stand-in BeginUpdating")
            with self._status_lock:
                updating = self._status["step"] < self._limit
                if updating:
                    self._status["data"] = "updating"
            if not updating:
                time.sleep(POLL_SECONDS)
        self._publish()

    def finished_update(self, step):
        with self._status_lock:
            self._status.update(step=step, data="updated")
        self._publish()

    def report(self, state):
        self._failed = state not in PAUSED
        self._status_store.set(f"tft/{self._epoch}/report/{self.rank}", state)
        if state not in PAUSED:
            self._status_store.add(f"tft/{self._epoch}/fault", 1)

    def wait_next_action(self):
        self._wait.acquire()
        return self._go

    def wait_repair_action(self):
        self._left.set()
        return self.wait_next_action()

    def dumped(self, code):
        self._status_store.set(f"tft/dumped/{self.rank}", str(code))

    def _publish(self):
        self._status_store.set(f"tft/status/{self.rank}", json.dumps(self._status))

    # ---- TFT's thread

    def _run(self):
        number = self._number
        with self.tft.thread_context():
            while not self._closed.is_set():
                if not self._store.check([f"tft/command/{number}"]):
                    time.sleep(POLL_SECONDS)
                    continue
                command = json.loads(self._store.get(f"tft/command/{number}"))
                mine = command["ranks"].get(str(self.rank))
                if mine is not None:
                    try:
                        code = self._do(command["op"], mine)
                        if not isinstance(code, int):
                            raise TypeError(f"{command['op']} answered {code!r}")
                    except BaseException as error:  # C++ has nobody to hand it to
                        self._store.set("tft/aborted", str(self.rank))
                        print(f"tft: rank {self.rank} aborts: {type(error).__name__}: {error}", flush=True)
                        os.abort()
                    self._store.set(f"tft/reply/{number}/{self.rank}", str(code))
                number += 1

    def _lock(self, step):
        """No update begins after that of ``step``; wait until this rank has ended it, or has failed."""
        with self._status_lock:
            self._limit = step
        deadline = time.monotonic() + REPLY_SECONDS
        while time.monotonic() < deadline:
            with self._status_lock:
                done, updating = self._status["step"], self._status["data"] == "updating"
            if self._failed or (done == step and not updating):
                return OK
            if done > step:
                return AGAIN
            time.sleep(POLL_SECONDS)
        return FAILED

    def _do(self, op, context):
        if op == "lock":
            return self._lock(context["step"])
        if op == "repair":
            self._left.wait(REPLY_SECONDS)  # until the training thread has left train()
        if op in ("stop", "clean"):
            self.repair_type = context["repair_type"]
            return getattr(self.tft, f"{op}_callback")()
        if op == "rollback":
            self._limit = context["step"]
        if op in ("rebuild", "repair", "rollback", "save"):
            return getattr(self.tft, f"{op}_callback")(context)
        if op == "exit":
            return self.tft.exit_callback()
        if op == "resume":
            self._epoch += 1
            self.force = self._failed = False
            self._status["step"], self._limit = self._limit, NO_LIMIT
            self._left.clear()
            self._publish()
        self._go = True
        self._wait.release()
        return 0


class Controller(threading.Thread):
    """``scheduler``: who starts dead processes again, if somebody does: ``lost()`` names their ranks, ``died()`` tells that
    there are such, ``start_again(ranks)`` asks for new ones."""

    def __init__(self, world_size, stores, checkpoint, scheduler=None):
        super().__init__(name="tft-controller", daemon=True)
        self.closed = threading.Event()
        self._ranks = range(world_size)
        self._store = stores()
        self._checkpoint, self._scheduler = checkpoint, scheduler
        self._number = 0
        self._epoch = 0

    def run(self):
        while not self.closed.wait(POLL_SECONDS):
            lost = self._scheduler.lost() if self._scheduler is not None else []
            if lost or self._store.add(f"tft/{self._epoch}/fault", 0):
                if not (self._replace(lost) if lost else self._recover()):
                    self._all("exit", {})
                    return
                self._epoch += 1

    def _all(self, op, context, ranks=None):
        """Give every rank its command and return the codes; a rank that does not answer has failed."""
        per_rank = context if ranks is not None else dict.fromkeys(self._ranks, context)
        number, self._number = self._number, self._number + 1
        command = {"op": op, "ranks": {str(rank): mine for rank, mine in per_rank.items()}}
        self._store.set(f"tft/command/{number}", json.dumps(command))
        deadline = time.monotonic() + REPLY_SECONDS
        keys = {rank: f"tft/reply/{number}/{rank}" for rank in per_rank}
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            # The connection of a rank that is gone is closed.
            if self._store.check(["tft/aborted"]) or (self._scheduler is not None and self._scheduler.died()):
                break
            time.sleep(POLL_SECONDS)
        return {rank: int(self._store.get(key)) if self._store.check([key]) else 1 for rank, key in keys.items()}

    def _statuses(self):
        return {rank: json.loads(self._store.get(f"tft/status/{rank}")) for rank in self._ranks}

    def _recover(self):
        if max(status["step"] for status in self._statuses().values()) == 0:
            print("tft: no optimizer update yet: refused", flush=True)
            return False
        if not self._lock(self._ranks):
            return False
        kinds = self._reports()
        dump = "RS_UNKNOWN" in kinds.values()
        if any(self._all("stop", {"repair_type": "dump" if dump else "retry"}).values()):
            return False
        kinds = self._reports()
        dump = dump or "RS_UNKNOWN" in kinds.values()
        codes = self._all("clean", {"repair_type": "dump" if dump else "retry"})
        if any(code not in (0, 2) for code in codes.values()):
            return False
        statuses = self._statuses()
        step = max(status["step"] for status in statuses.values())
        if dump:
            self._dump(step)
            return False
        self._all("release", {})
        context = self._context(step)
        if any(kinds[rank] == "RS_UCE" and codes[rank] == 0 for rank in self._ranks):
            hit = [rank for rank in self._ranks if kinds[rank] == "RS_UCE" and codes[rank] == 0]
            late = self._late(statuses, step)
            wrong = sorted({*hit, *(rank for rank in late if codes[rank] == 0)})
            whole = {rank for rank in self._ranks if rank not in wrong and rank not in late and codes[rank] == 0}
            if not self._repair(context, statuses, wrong, hit, whole):
                return False
        return self._roll_back(context)

    def _replace(self, lost):
        """Processes have died ("ARF"): the others stop, new ones come, all links are built anew, and the new are repaired."""
        alive = [rank for rank in self._ranks if rank not in lost]
        if max(status["step"] for status in self._statuses().values()) == 0:
            print("tft: no optimizer update yet: refused", flush=True)
            return False
        if not self._lock(alive):
            return False
        for op in ("stop", "clean"):
            if any(self._all(op, {rank: {"repair_type": "recover"} for rank in alive}, ranks=alive).values()):
                return False
        step = max(status["step"] for status in self._statuses().values())
        self._all("release", {rank: {} for rank in alive}, ranks=alive)
        for rank in lost:
            self._store.set(f"tft/awaited/{rank}", json.dumps([self._epoch, self._number]))
        self._scheduler.start_again(lost)
        keys = [f"tft/{self._epoch}/report/{rank}" for rank in lost]
        deadline = time.monotonic() + REPLY_SECONDS
        while not self._store.check(keys):  # the new processes have come as far as train(): "ARF FINISH"
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        context = self._context(step)
        if any(self._all("rebuild", {"fault_ranks": lost, "repair_id": context["repair_id"]}).values()):
            return False
        statuses = self._statuses()
        wrong = sorted({*lost, *self._late(statuses, step)})
        return self._repair(context, statuses, wrong, [], set(self._ranks) - set(wrong)) and self._roll_back(context)

    def _context(self, step):
        context = {"step": step, "repair_id": self._epoch + 1, "rank_list": [], "repair_type": 3}
        return context | {"type": [], "src": [], "dst": []}

    def _late(self, statuses, step):
        return [r for r in self._ranks if statuses[r]["data"] != "updated" or statuses[r]["step"] != step]

    def _repair(self, context, statuses, wrong, hit, whole):
        plans = self._plan(context, statuses, wrong, hit, whole)
        return plans is not None and not any(self._all("repair", plans, ranks=plans).values())

    def _roll_back(self, context):
        if any(self._all("rollback", context).values()):
            return False
        self._all("resume", {})
        return True

    def _reports(self):
        reports = {rank: f"tft/{self._epoch}/report/{rank}" for rank in self._ranks}
        return {r: self._store.get(key).decode() if self._store.check([key]) else "" for r, key in reports.items()}

    def _lock(self, ranks):
        """Let every rank that is well end the update that one has begun, and begin no other."""
        codes = [AGAIN]
        while AGAIN in codes:
            step = max(status["step"] for status in self._statuses().values())
            codes = list(self._all("lock", {rank: {"step": step} for rank in ranks}, ranks=ranks).values())
        return not any(codes)

    def _plan(self, context, statuses, wrong, hit, whole):
        """What each rank that takes part has to do; its lists run in parallel, over all types of optimizers."""
        from .framework_ttp.ttp_decorator import RepairType

        moves = []  # source, destination, optimizer type
        for rank in wrong:
            for kind, replicas in enumerate(statuses[rank]["replicas"]):
                source = _source(rank, replicas, whole)
                if source is None:
                    return self._plan_to_load(context, hit)
                moves.append((source, rank, kind))
        members = sorted({rank for move in moves for rank in move[:2]})
        plans = {}
        for rank in members:
            mine = [move for move in moves if rank in move[:2]]
            high = RepairType.RT_UCE_HIGHLEVEL if rank in hit else RepairType.RT_RECV_REPAIR
            plans[rank] = context | {
                "repair_type": high.value if rank in wrong else RepairType.RT_SEND.value,
                "type": [kind for _, _, kind in mine],
                "src": [source for source, _, _ in mine],
                "dst": [destination for _, destination, _ in mine],
                "rank_list": members,
            }
        return plans

    def _plan_to_load(self, context, hit):
        from .framework_ttp.ttp_decorator import RepairType

        if self._checkpoint is None or not os.path.exists(self._checkpoint):
            return None
        kind = {r: RepairType.RT_LOAD_REBUILD if r in hit else RepairType.RT_LOAD_CKPT for r in self._ranks}
        return {rank: context | {"repair_type": kind[rank].value} for rank in self._ranks}

    def _dump(self, step):
        self._all("save", {"step": step, "ranks": list(self._ranks)})
        deadline = time.monotonic() + REPLY_SECONDS
        keys = [f"tft/dumped/{rank}" for rank in self._ranks]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _source(rank, replicas, whole):
    """The first valid rank, cyclically, that holds the same shard as ``rank``; None if there is none."""
    ranks, stride = replicas["rank_list"], len(replicas["rank_list"]) // replicas["replica_cnt"]
    place = ranks.index(rank)
    places = [(place + offset) % len(ranks) for offset in range(stride, len(ranks), stride)]
    return next((ranks[other] for other in places if ranks[other] in whole), None)
