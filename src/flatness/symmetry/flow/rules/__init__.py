"""The rules by which labels pass operators, by the words that `flatness.network.operators` has for them."""

from __future__ import annotations

from types import FunctionType

from flatness.symmetry.flow.flow import Rule
from flatness.symmetry.flow.rules import contractions, elementwise, layouts, norms

# Every public function of these files is a rule.
RULES: dict[str, Rule] = {
    name: rule
    for module in (contractions, elementwise, layouts, norms)
    for name, rule in vars(module).items()
    if isinstance(rule, FunctionType) and rule.__module__ == module.__name__ and not name.startswith("_")
}
