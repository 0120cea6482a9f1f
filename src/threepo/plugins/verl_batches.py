"""Batches of verl, split by the draws that wrote their rows, and outputs of the parts as one."""

from collections.abc import Collection
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType


def rows_of_draws(draws: Collection[int], data: Any, ranks: Any) -> tuple[list[int], Any]:
    """Positions of the rows that the draws wrote, and a batch of them, filled up with rows that are masked.

    All ranks get as many rows as the rank with most, because verl needs equally many micro-batches on each; and no
    batch if no rank has any, as may be in a small mini-batch.
    """
    rows = [row for row, fields in enumerate(tu.get(data, "extra_fields")) if fields["draw"] in draws]
    most = torch.tensor(len(rows), device=get_device_name())
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, ranks)
    if not int(most):
        return [], None
    shortest = int(data["input_ids"].offsets().diff().argmin())
    part = tu.index_select_tensor_dict(data, rows + [shortest] * (int(most) - len(rows)))
    for name in {"loss_mask", "response_mask"} & set(part.keys()):
        masks = [mask if i < len(rows) else torch.zeros_like(mask) for i, mask in enumerate(part[name].unbind())]
        part[name] = tu.nested_tensor_from_tensor_list(masks)
    return rows, part


def join_outputs(parts: list[tuple[list[int], Any]], shares: list[float]) -> dict[str, Any]:
    """Join the outputs of the parts (rows, output) of a batch as verl has them; `shares` weight the losses."""
    metrics: dict[str, Any] = {}
    for (_, out), share in zip(parts, shares, strict=True):
        for name, values in out["metrics"].items():
            if getattr(values, "aggregation", None) == AggregationType.SUM:
                values.values = [value * share for value in values.values]
            if name in metrics:
                metrics[name].extend(values)
            else:
                metrics[name] = values
    model_output = {}
    for name in parts[0][1]["model_output"]:
        by_row = {  # `zip` leaves out the rows with which a part was filled up
            row: value
            for rows, out in parts
            for row, value in zip(rows, out["model_output"][name].unbind(), strict=False)
        }
        model_output[name] = torch.nested.as_nested_tensor([by_row[row] for row in sorted(by_row)], layout=torch.jagged)
    losses = [loss * share for (_, out), share in zip(parts, shares, strict=True) for loss in out["loss"]]
    return {"model_output": model_output, "loss": losses, "metrics": metrics}
