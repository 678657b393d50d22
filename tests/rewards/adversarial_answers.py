"""Answers and their verdicts, for the tests of rewards."""


def box(answer: str) -> str:
    return f"The answer is $\\boxed{{{answer}}}$."


def tower(base: str, height: int) -> str:
    """`9^{9^{9}}`, of this height."""
    n_exponents = height - 1
    return f"{base}^{{" * n_exponents + base + "}" * n_exponents


MANY = 10_000
LONG = 100_000
CHARACTERS = ("a", "5", "{", "}", "\\", "$", " ", "\n", "(", "^", "_", "🙂", "\x00")
LONG_TEXTS = [character * LONG for character in CHARACTERS]
LARGE_EXPONENTS = ("11E999999999", "-1.5E-999999999", "11E+999999999", r"11E\text{}999999999", r"11E\$999999999")

# What a model under training writes, by pattern: completion, gold answer, verdict. docs/rewards.md has the rules.
ADVERSARIAL = {
    "nested exponents": [(box(tower("9", height)), "5", 0.0) for height in (3, 5, 40)],
    "nested exponents of a variable": [(box(tower("x", 30)), "x", 0.0)],
    "factorials": [(box("9!!!!"), "5", 0.0), (box("(10^{9})!"), "5", 0.0)],
    "numbers with a large exponent": [(box(number), "5", 0.0) for number in LARGE_EXPONENTS],
    "numbers with an exponent": [(box(number), "1500", 1.0) for number in ("1.5E3", "1.5E+3", "15000E-1")],
    "boxes that are never closed": [("\\boxed{" * MANY, "5", 0.0), ("\\boxed{" * MANY + "5", "5", 0.0)],
    "boxes in boxes": [("\\boxed{" * MANY + "5" + "}" * MANY, "5", 1.0)],
    "number of 100,000 digits": [(box("7" * LONG), "7", 0.0), ("7" * LONG, "7", 0.0)],
    "gold answer of 100,000 digits": [(box("7"), "7" * LONG, None)],
    "deep brackets": [
        (box("((5))"), "5", 1.0),
        (box("(" * 140 + "5" + ")" * 140), "5", 0.0),
        (box("{" * MANY), "5", 0.0),
    ],
    "unbalanced LaTeX": [
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0.0),
        (r"\boxed{\frac{1}{2}}}}}", r"\frac{1}{2}", 1.0),
        (box(r"\left(1, 2"), "(1,2)", 0.0),
        (box(r"\sqrt{"), "2", 0.0),
    ],
    "Unicode": [
        (box("−5"), "-5", 1.0),
        (box("2π"), r"2\pi", 1.0),
        (box("３"), "3", 0.0),
        (box("½"), r"\frac{1}{2}", 0.0),
        (box("x²"), "x^2", 0.0),
        (box("五"), "5", 0.0),
        (box("\u200b5\u200b"), "5", 0.0),
        (box("5\x00"), "5", 0.0),
    ],
    "empty": [("", "5", 0.0), (" \n", "5", 0.0), (box(""), "5", 0.0), (box(r"\,"), "5", 0.0)],
    "100 kB of one character": [(text, "5", 0.0) for text in [*LONG_TEXTS, *map(box, LONG_TEXTS)]],
    "several boxes": [
        (r"First \boxed{2}, no: \boxed{3}", "3", 1.0),
        (r"First \boxed{3}, no: \boxed{2}", "3", 0.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2", 1.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "2", 0.0),
    ],
    "answer behind the final box": [
        (r"\boxed{2}. No, the answer is 3.", "3", 0.0),
        (r"\boxed{2} \text{or rather } 3", "3", 0.0),
        (r"\boxed{2} <!-- 3 -->", "3", 0.0),
    ],
    "all options": [
        (box("A, B, C, D"), r"\text{B}", 0.0),
        (box(r"\text{A or B or C or D}"), r"\text{B}", 0.0),
        (r"\boxed{A}, \boxed{C}, \boxed{B}", r"\text{B}", 0.0),
        (r"\boxed{1} or \boxed{2} or \boxed{3}", "3", 0.0),
        (box("1, 2, 3, 4, 5"), "3", 0.0),
        (box(r"1 \text{ or } 3"), "3", 0.0),
        (box(r"\pm 3"), "3", 0.0),
        (box(r"x \in \mathbb{R}"), "3", 0.0),
        (box(r"(-\infty, \infty)"), "3", 0.0),
    ],
    "a free variable": [
        (box("x"), "5", 0.0),
        (box("x = x"), "5", 0.0),
        (box("x"), "x = 5", 0.0),
        (box("n"), "12", 0.0),
        ("The answer is x.", "5", 0.0),
    ],
    "the question in the box": [
        (box("What is 2 + 3?"), "5", 0.0),
        (box(r"\text{the value of } 2 + 3"), "5", 0.0),
        (box("? = 5"), "4", 0.0),
        (box("x + 2 = 5"), "3", 0.0),
        (box("2 + 3"), "5", 0.0),
        (box("2x + 3x"), "5x", 1.0),  # of other answers, a term that equals it is right, whoever wrote it
    ],
}
