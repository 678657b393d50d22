r"""
Coverage-guided fuzzing of the rewards, by atheris (`pip install atheris`; Linux, Python 3.11 to 3.13).

    python tests/fuzz/rewards.py -runs=1000000 -max_len=200 -len_control=0 -timeout=60 [CORPUS_FOLDER]

The options are libFuzzer's. An input becomes a completion and a gold answer, of LaTeX tokens or of any characters.
What ends the run, with the input in a file `crash-…` or `timeout-…`: an exception out of a reward, a value that is
none of 0, 1 and `None`, or more processor time than all limits of `score` together.
"""

import sys
import time

import atheris


with atheris.instrument_imports(include=["opo_trl", "math_verify"]):
    from opo_trl.rewards import PARSING_LIMIT, VERIFYING_LIMIT, format_reward, score

LIMIT = 2 * (PARSING_LIMIT + VERIFYING_LIMIT) + 5  # seconds, with 5 for what has no limit of its own

TOKENS = r"""
\frac \dfrac \sqrt \text{ \boxed{ \boxed \fbox{ \left \right \begin{pmatrix} \end{pmatrix} \\ \{ \} { } ( ) [ ] , . ; :
0 1 2 3 7 9 12 100 1000 x y n e i - + * / = ^ ^{ _ & % \% $ \$ | ! < > cm \pi \cup \cap \infty \in \le \ge \ne \circ
\pm \cdot \times \approx \sum_{ \int_ \lim \log \sin \cos \binom \mathbb{R} \emptyset and or degrees \, \! \quad
<think> </think> √ ² ½ − π ∞
"""
ALPHABET = [*TOKENS.split(), " ", "\n"]
GOLDS = ("5", r"\frac{1}{2}", "x^2-1", "(1,2]", r"\{1,2\}", r"\text{even}", r"5\text{ cm}", r"\frac{\pi}{4}, 2")


def text(raw: bytes, of_tokens: bool) -> str:
    return "".join(ALPHABET[byte % len(ALPHABET)] for byte in raw) if of_tokens else raw.decode(errors="replace")


def check(raw: bytes) -> None:
    """The first byte says what the others are; the second one where the gold answer ends, if it is one of them."""
    kind, end = (*raw[:2], 0, 0)[:2]
    boxed, of_tokens, own_gold = kind & 1, kind & 6, kind & 24 == 24
    gold = text(raw[2 : 2 + end % 32], True) if own_gold else GOLDS[end % len(GOLDS)]
    answer = text(raw[2 + end % 32 if own_gold else 2 :], bool(of_tokens))
    completion = f"The answer is $\\boxed{{{answer}}}$." if boxed else answer
    start = time.process_time()
    assert score(completion, gold) in (0.0, 1.0, None)
    assert format_reward([completion])[0] in (0.0, 1.0)
    assert time.process_time() - start < LIMIT


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
