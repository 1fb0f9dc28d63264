"""The rules by which labels pass operators, by the words that `flatness.network.operators` has for them."""

from __future__ import annotations

from flatness.symmetry.flow.flow import Rule
from flatness.symmetry.flow.rules import contractions, elementwise, layouts, norms

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(elementwise.copies, elementwise.homogeneous, elementwise.pointwise, elementwise.softmax),
        *(elementwise.clamp, elementwise.power, elementwise.prelu, elementwise.sign, elementwise.add),
        *(elementwise.compare, elementwise.where, elementwise.multiply, elementwise.divide),
        *(layouts.layout, layouts.pick, layouts.filling, layouts.pad, layouts.set_item, layouts.creation),
        *(layouts.reduction, layouts.along, layouts.pooling),
        *(contractions.linear, contractions.matmul, contractions.conv, contractions.conv_transpose),
        *(contractions.embedding, contractions.scaled_attention),
        *(norms.batch_norm, norms.feature_norm, norms.group_norm, norms.instance_norm),
    )
}
