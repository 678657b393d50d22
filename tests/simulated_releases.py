"""
Simulated releases of TRL: copies of the installed one, with another number and with edits of their source.

No later release can be installed here, so [`later`] is what one may be like, and not what one is.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from unittest.mock import patch


Edits = Mapping[str, Sequence[tuple[str, str]]]  # file in the library → texts and what replaces them

_TRAINER = "trainer/grpo_trainer.py"
_ENTRY = '            "num_items_in_batch": num_items_in_batch,\n        }\n'

# A simulated 1.17: a new entry of rollouts, a new keyword of a private method, which TRL passes, and a new default.
LATER: Edits = {
    _TRAINER: [
        (_ENTRY, _ENTRY.replace("        }", '            "sampling_mask": completion_mask.clone(),\n        }')),
        ("    def _generate(self, prompts: list):", "    def _generate(self, prompts: list, priority=None):"),
        (") = self._generate(prompts)", ") = self._generate(prompts, priority=1)"),
    ],
    "trainer/grpo_config.py": [
        ("    beta: float = field(\n        default=0.0,", "    beta: float = field(\n        default=0.001,"),
    ],
}
# One that breaks, where no name and no parameter shows it.
_MASK = '            "completion_mask": completion_mask,\n            "advantages"'
_SHIFTED_MASK = "torch.nn.functional.pad(completion_mask[:, :-1], (1, 0))"
SHIFTED: Edits = {_TRAINER: [(_MASK, _MASK.replace(" completion_mask", f" {_SHIFTED_MASK}"))]}


def simulate(folder: Path, *, number: str = "1.17.0", edits: Edits = LATER, library: str = "trl") -> Path:
    """Make a simulated release of a library; returns the folder that has to be first on PYTHONPATH."""
    installed = distribution(library)
    shutil.copytree(Path(str(installed.locate_file(library))), folder / library)
    for name, replacements in edits.items():
        path = folder / library / name
        text = path.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text, f"{name} does not have {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    metadata = str(installed.read_text("METADATA"))
    metadata = metadata.replace(f"Version: {installed.version}", f"Version: {number}", 1)
    information = folder / f"{library}-{number}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(metadata, encoding="utf-8")
    return folder


@contextmanager
def untested_release() -> Iterator[None]:
    """In this process, the installed release counts as one that has not been tested."""
    places = [f"opo_trl.{module}.untested" for module in ("generation.rollouts", "generation.first_step")]
    with patch(places[0], lambda: {"trl": "1.17.0"}), patch(places[1], lambda: {"trl": "1.17.0"}):
        yield
