"""How much memory work may take, on a GPU that is made up."""

import torch

from flatness.network import memory


def test_memory_that_torch_holds_from_earlier_work_counts_as_free(monkeypatch):
    gigabyte = 2**30
    sizes = {"reserved_bytes": 50 * gigabyte, "allocated_bytes": 10 * gigabyte}
    held = {name: {"all": {"current": size}} for name, size in sizes.items()}
    said = {"mem_get_info": (40 * gigabyte, 100 * gigabyte), "memory_stats_as_nested_dict": held}
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    device = torch.device("cuda", 0)
    assert memory.free_on(device) == 80 * gigabyte
    assert memory.batch_budget(device, backward=True) == memory.kept_budget(device) == 20 * gigabyte
