"""The work of a study that is an experiment: one unit after the other, each with a record of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from flatness.study.experiments.catalogue import experiment
from flatness.study.experiments.experiment import DONE, unit_key
from flatness.study.folder.in_hand import in_hand
from flatness.study.folder.records import FAILED, Folder
from flatness.study.run.orders import Orders, done_in_time, failures_told

Task = tuple[str, Mapping[str, Any]]
"""The name of an experiment, and one of its units of work."""


def do_task(task: Task, orders: Orders) -> bool:
    """Bring one unit of an experiment to its record, if it has none; False when time ran out."""

    def work(folder: Folder) -> None:
        key = unit_key(*task)
        if folder.record(key) is not None:
            return
        orders.check_time()
        started, record = time.perf_counter(), _head(task, orders)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # units run side by side
        try:
            with (
                failures_told(folder, lambda why: record.update(status=FAILED, reason=why)),
                in_hand(folder, key, "measuring", [key]),
            ):
                record |= {"rows": experiment(task[0], "the study").work(task[1]), "status": DONE}
        finally:
            torch.set_num_threads(threads)
        folder.write_record(key, {**record, "seconds": round(time.perf_counter() - started, 3)})

    return done_in_time(orders, work)


def give_up_task(task: Task, _: str, times: int, orders: Orders) -> None:
    """Leave a record of a unit that killed its process again and again."""
    reason = f"killed its process {times} times, perhaps for want of memory. --retry tries it again."
    record = {**_head(task, orders), "status": FAILED, "reason": reason}
    Folder(orders.folder).write_record(unit_key(*task), record)


def _head(task: Task, orders: Orders) -> dict[str, Any]:
    return {"experiment": task[0], "unit": dict(task[1]), "reason": "", "rows": [], **orders.stamp()}
