r"""
Coverage-guided fuzzing of the rewards, by atheris (`pip install atheris`; Linux, Python 3.11 to 3.13).

    python tests/fuzz/rewards.py -seed=1 -runs=40000 -max_len=32 -len_control=0 -timeout=120 [CORPUS_FOLDER]

The options are libFuzzer's. With many more inputs in one process, the parser's cache exceeds the memory limit. An
input becomes a completion and a gold answer: formulas, LaTeX tokens in any order, or any characters. With 32 bytes,
nearly all are shorter than the 300 characters beyond which answers are not parsed.
The run stops, with the input in a file `crash-…` or `timeout-…`, if a reward raises an exception, returns a value
other than 0, 1 and `None`, takes more processor time than all limits of `score` together, or evaluates text other than
numbers as Python (SymPy reads numbers that way). It prints how far inputs came.
"""

import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import atheris
import sympy.physics.units  # noqa: F401 - evaluates names of its own when first imported


# The generated parser consists of tables and loops, whose coverage says nothing about formulas.
GENERATED = [f"latex2sympy2_extended.gen.antlr4_13_2.{name}" for name in ("PSLexer", "PSParser", "PSListener")]

with atheris.instrument_imports(include=["opo_trl", "math_verify", "latex2sympy2_extended"], exclude=GENERATED):
    from opo_trl.rewards import accuracy as rewards

LIMIT = 2 * (rewards.PARSING_LIMIT + rewards.VERIFYING_LIMIT) + 5  # seconds, with 5 for code without a limit
MEMORY = 2 * 2**30  # bytes, as in a worker; `12!!!!` asks for more

TOKENS = r"""
\frac \dfrac \sqrt \text{ \boxed{ \boxed \fbox{ \left \right \begin{pmatrix} \end{pmatrix} \\ \{ \} { } ( ) [ ] , . ; :
0 1 2 3 7 9 12 100 1000 x y n e i - + * / = ^ ^{ _ & % \% $ \$ | ! < > cm \pi \cup \cap \infty \in \le \ge \ne \circ
\pm \cdot \times \approx \sum_{ \int_ \lim \log \sin \cos \binom \mathbb{R} \emptyset and or degrees \, \! \quad
<think> </think> √ ² ½ − π ∞
"""
ALPHABET = [*TOKENS.split(), " ", "\n"]
# `@` stands for a formula.
FORMULAS = r"""
0 1 2 3 5 7 12 100 10,000 0.5 .\overline{3} x y n e i \pi \infty \theta \mathbb{R} \emptyset A \text{even}
\frac{@}{@} \frac@@ \sqrt{@} \sqrt[@]{@} @^{@} @^@ @_{@} @+@ @-@ @\cdot@ @/@ @@ -@ \pm@ @! |@| (@) \left(@\right)
(@,@) [@,@) (@,@] \{@,@\} \{@\} @,@ @;@ @\cup@ @\cap@ @\setminus@ @\in@ @=@ @\le@ @<@<@ @\ne@ @\approx@ @\% \$@
@^\circ @\text{cm} @\text{~and~}@ \text{@} \log_{@}@ \ln@ \sin@ \arctan@ \binom{@}{@} \sum_{n=1}^{@}@ \int_0^@@dx
\lim_{x\to@}@ \lfloor@\rfloor \begin{pmatrix}@\\@\end{pmatrix} \begin{pmatrix}@&@\end{pmatrix} \overline{@} \boxed{@}
@:@ @\mod@ @\to@ 3E@ 3E-@ 3E+@ \sum_{n=0}^\infty\frac{@^n}{n!} \text{x.real}
"""
ATOMS = [form for form in FORMULAS.split() if "@" not in form]
FORMS = [form for form in FORMULAS.split() if "@" in form]
GOLDS = ("5", r"\frac{1}{2}", "x^2-1", "(1,2]", r"\{1,2\}", r"\text{even}", r"5\text{ cm}", r"\frac{\pi}{4}, 2", "e^x")

# What may be compiled: imports, SymPy's own arithmetic, polynomials with integer coefficients, and numbers, which
# SymPy reads with functions if mpmath recognizes a float, such as `exp(1)`.
HARMLESS = re.compile(
    r"((from|import) [\w.]+( import \*)?(; |$))+"
    r"|def monomial_\w+\(.*"
    r"|def _lambdifygenerated\(\w+\):\s+return (?!.*\w\()[\w\s*+()-]*"
    r"|((Integer|Float|Rational) \([^()]*\)|exp|log|sqrt|[-+*/()\s])+",
    re.DOTALL,
)

evaluated: list[str] = []  # what is not harmless
calls: Counter[str] = Counter()  # of math-verify, for the current input
reached: Counter[str] = Counter()  # inputs by how far they came


def calling(frame: FrameType | None) -> Iterator[str]:
    """Names of the modules on the stack; some compile their own text while they are imported."""
    while frame is not None:
        yield frame.f_globals["__name__"]
        frame = frame.f_back


def watch(event: str, arguments: tuple) -> None:
    if event != "compile" or arguments[0] is None:
        return
    written = str(arguments[1]).startswith(("<string>", "<lambdifygenerated"))  # not read from a file
    if written and not any("importlib" in name or name == "typing" for name in calling(sys._getframe(1))):
        source = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        if not HARMLESS.fullmatch(source.strip()):
            evaluated.append(source)


def counted(function: Callable) -> Callable:
    def call(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


sys.addaudithook(watch)
rewards.parse, rewards.verify = counted(rewards.parse), counted(rewards.verify)


def formula(choices: Iterator[int]) -> str:
    """The formula of a sequence of bytes, completed with ones."""
    choice = next(choices, None)
    if choice is None:
        return "1"
    if choice < 96:
        return ATOMS[choice % len(ATOMS)]
    first, *others = FORMS[choice % len(FORMS)].split("@")
    return first + "".join(formula(choices) + other for other in others)


def text(raw: bytes, kind: int) -> str:
    """Any characters, tokens in any order, or a formula."""
    if kind == 0:
        return raw.decode(errors="replace")
    if kind == 1:
        return "".join(ALPHABET[byte % len(ALPHABET)] for byte in raw)
    return formula(iter(raw))


def check(raw: bytes) -> None:
    """The first byte selects the kinds of texts; the second one the gold answer, or its end in the input."""
    kind, end = (*raw[:2], 0, 0)[:2]
    boxed, own_gold, rest = kind & 1, kind & 2, raw[2:]
    gold, rest = (text(rest[: end % 16], 2), rest[end % 16 :]) if own_gold else (GOLDS[end % len(GOLDS)], rest)
    answer = text(rest, kind >> 2 & 3)
    completion = f"The answer is $\\boxed{{{answer}}}$." if boxed else answer
    calls.clear()
    start = time.process_time()
    assert rewards.score(completion, gold) in (0.0, 1.0, None)
    assert rewards.format_reward([completion])[0] in (0.0, 1.0)
    assert time.process_time() - start < LIMIT
    assert not evaluated, evaluated[:3]
    reached.update({"inputs": 1, "answers parsed": calls["parse"] > 1, "compared": calls["verify"] > 0})
    if reached["inputs"] % 10_000 == 0:
        print(*(f"{name}: {count}" for name, count in reached.items()), sep=", ", file=sys.stderr)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
