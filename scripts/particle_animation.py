"""Draws docs/assets/particles.svg, the animation of the README, from a run of `steer`.

Each frame is a step of a particle filter of the demo model: the texts so far, the new tokens,
and the weights. After resampling, lines lead from each ancestor to its copies. The frames are
groups of one SVG file that CSS shows in turn; without animations, the last one is visible. The
file has the texts and weights as JSON in its metadata, so that a test can run the filter
again and compare.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TypedDict

import numpy as np

import genlm
from genlm.cli.smc import max_word_length

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "particles.svg"
PROMPT, SIZE, MAX_LETTERS, MAX_TOKENS, SEED = "The", 10, 5, 24, 6
SECONDS, LAST_SECONDS = 0.8, 4.0
WIDTH, TOP, ROW, LINES, BAR, CHARACTERS = 760, 34, 22, 70, 60, 88

STYLE = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #808080;
    white-space: pre }
  .new { fill: #d97706; font-weight: bold }
  .bar { fill: #3b82c4 }
  .line { fill: none; stroke: #808080; stroke-width: 1; opacity: 0.6 }
  .over { opacity: 0.45 }
  .frame { visibility: hidden }
  .frame:last-of-type { visibility: visible }
  @media (prefers-reduced-motion: no-preference) {
    .frame { animation: TOTALs step-end infinite }
    RULES
  }
"""


class Frame(TypedDict):
    """The particles after a step, in order."""

    texts: list[str]
    tokens: list[str]
    weights: list[float]
    ancestors: list[int]
    finished: list[bool]


def record() -> list[Frame]:
    """Run the filter and return a frame for each step."""
    frames: list[Frame] = []
    with genlm.load_model("demo", "hf") as llm:
        prompt = llm.encode(PROMPT)
        rule = max_word_length(MAX_LETTERS).start(llm, SIZE, text=PROMPT.encode())
        options = {"max_tokens": MAX_TOKENS, "constraint": rule, "seed": SEED}
        for particles in genlm.smc.steer_sync(llm, prompt, SIZE, **options):
            tokens = particles.token_ids[particles.ancestors]
            frames.append(
                Frame(
                    texts=[_shown(llm.decode(each.token_ids)) for each in particles.population],
                    tokens=[
                        "" if token < 0 else _shown(llm.decode([token])) for token in tokens
                    ],
                    weights=np.round(particles.weights, 4).tolist(),
                    ancestors=particles.ancestors.tolist(),
                    finished=particles.population.finished.tolist(),
                )
            )
    return frames


def shown_in(picture: Path) -> list[Frame]:
    """Read the frames that a picture shows from its metadata."""
    [found] = re.findall(r"<metadata>(.*?)</metadata>", picture.read_text("utf-8"), re.DOTALL)
    frames: list[Frame] = json.loads(html.unescape(found))
    return frames


def drawn(frames: list[Frame]) -> str:
    """Return the SVG document of the frames."""
    total = SECONDS * (len(frames) - 1) + LAST_SECONDS
    rules = []
    for i in range(len(frames)):
        begin, end = 100 * SECONDS * i / total, 100 * SECONDS * (i + 1) / total
        shown = f"{begin:.3f}% {{ visibility: visible }}"
        hidden = f"{end:.3f}%, 100% {{ visibility: hidden }}" if i < len(frames) - 1 else ""
        before = "0% { visibility: hidden } " if i else ""
        rules.append(f"@keyframes f{i} {{ {before}{shown} {hidden} }}")
        rules.append(f"#f{i} {{ animation-name: f{i} }}")
    style = STYLE.replace("TOTAL", f"{total:.1f}").replace("RULES", "\n    ".join(rules))
    height = TOP + ROW * SIZE + 8
    body = "\n".join(_frame(i, frame) for i, frame in enumerate(frames))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        f"<title>{SIZE} particles of the demo model; no word has more than {MAX_LETTERS} "
        f"letters</title>\n"
        f"<metadata>{html.escape(json.dumps(frames), quote=False)}</metadata>\n"
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def _frame(number: int, frame: Frame) -> str:
    resampled = frame["ancestors"] != list(range(SIZE))
    state = "resampled" if resampled else "extended by a token each"
    parts = [
        f'<g class="frame" id="f{number}">',
        f'<text x="0" y="16">step {number + 1}: {state}</text>',
    ]
    for row, text in enumerate(frame["texts"]):
        middle = TOP + ROW * row + ROW / 2
        over = " over" if frame["finished"][row] else ""
        if resampled:
            start = TOP + ROW * frame["ancestors"][row] + ROW / 2
            bend = LINES / 2
            parts.append(
                f'<path class="line" d="M0 {start:g} C{bend:g} {start:g} {bend:g} {middle:g} '
                f'{LINES - 6} {middle:g}"/>'
            )
        length = max(1.0, BAR * frame["weights"][row] / max(frame["weights"]))
        parts.append(
            f'<rect class="bar" x="{LINES}" y="{middle - 5:g}" width="{length:.1f}" '
            f'height="10"/>'
        )
        token = frame["tokens"][row]
        known = text.removesuffix(token) if token else text
        new = f'<tspan class="new">{html.escape(token)}</tspan>' if token else ""
        parts.append(
            f'<text class="row{over}" x="{LINES + BAR + 12}" y="{middle + 4:g}">'
            f"{html.escape(known[-CHARACTERS:])}{new}</text>"
        )
    return "\n".join([*parts, "</g>"])


def _shown(text: str) -> str:
    return text.replace("\n", "\u23ce")


if __name__ == "__main__":
    PICTURE.write_text(drawn(record()), "utf-8")
