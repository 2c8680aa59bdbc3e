"""Run each command of the pages in docs/tutorials again and replace the recorded output with the new one.

A page is text with blocks of ```console in it. In a block, a line that begins with `$ ` is typed into one bash, in a new folder
in which `data` is the folder of labeled sets and `DISTCSE` this clone. What follows, up to the next such line, is what it
printed, and `[12 s]` how long it took if that is a second or more.

    DISTCSE_DATA=../shared/data python -m benchmarks.journeys docs/tutorials/research.md

A command that fails ends the walk; the page then stays as it was. The text after `<!-- all -->`, up to `<!-- / -->`, becomes the
minutes of all commands; that after `<!-- machine -->` becomes the CPU and its cores.

With `--silences`, the commands are typed without `--quiet`, the pages stay as they are, and each line that came more than ten
seconds after the one before is listed with its seconds and that line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from distcse.devices.device import cpu_name

_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_HERE = "<<'END'"
_MOST, _FIRST = 36, 14
"""Lines kept of what a command prints, and how many of them are its first."""
_SILENCE_S = 10.0


class Shell:
    """One bash: what a command exports or puts into the background is there for those after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.silences: list[str] = []
        """Lines that came late: the seconds, the command, the line before and the line."""
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[list[str], float]:
        """What a command prints, and its seconds. `SystemExit` where it fails."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        mark = f"=== {time.time_ns()}"
        begun = time.perf_counter()
        self._bash.stdin.write(f"{command}\nprintf '\\n%s %s\\n' '{mark}' $?\n")
        self._bash.stdin.flush()
        printed: list[str] = []
        last = begun
        for line in self._bash.stdout:
            if (waited := time.perf_counter() - last) > _SILENCE_S:
                between = " | ".join(text.strip() for text in (command.partition("\n")[0], *printed[-1:], line))
                self.silences.append(f"{waited:5.0f} s | {between}")
            last += waited
            if line.startswith(mark):
                if line.split()[-1] != "0":
                    raise SystemExit(f"`{command}` failed:\n{''.join(printed)}")
                return self._shown(printed), time.perf_counter() - begun
            printed.append(line)
            sys.stderr.write(line)
        raise SystemExit(f"`{command}` ended the shell")

    def close(self) -> None:
        """End it, and what it left in the background."""
        assert self._bash.stdin is not None
        self._bash.stdin.write("kill $(jobs -p) 2>/dev/null\nexit\n")
        self._bash.stdin.close()
        self._bash.wait(timeout=60)

    def _shown(self, printed: list[str]) -> list[str]:
        shown = [line.rstrip().replace(f"{self._folder}/", "") for line in printed]
        while shown and not shown[-1]:
            shown.pop()
        if len(shown) > _MOST:
            shown[_FIRST : len(shown) - (_MOST - _FIRST)] = ["…"]
        return shown


def commands(lines: Sequence[str]) -> Iterator[str]:
    """Yield a block's commands; a command continues after a backslash and up to the END of a here-document."""
    rest = iter(lines)
    for line in rest:
        if line.startswith("$ "):
            typed = [line[2:]]
            while typed[-1].endswith("\\"):
                typed.append(next(rest))
            if _HERE in typed[-1]:
                typed += [*takewhile(lambda given: given != "END", rest), "END"]
            yield "\n".join(typed)


def walk(page: str, shell: Shell, quiet: bool = True) -> str:
    """The page with what its commands print now; without `quiet`, what they print without `--quiet`."""

    def again(block: re.Match[str]) -> str:
        lines = []
        for typed in commands(block[0].splitlines()):
            printed, seconds = shell.run(typed if quiet else typed.replace(" --quiet", ""))
            lines += [f"$ {typed}", *printed, *([f"[{seconds:.0f} s]"] if seconds >= 1 else [])]
        return "\n".join(lines) + "\n"

    begun = time.perf_counter()
    walked = _BLOCK.sub(again, page)
    minutes = f"{(time.perf_counter() - begun) / 60:.0f} minutes"
    machine = f"{cpu_name()}, {os.cpu_count()} cores"
    for mark, value in {"all": minutes, "machine": machine}.items():
        walked = re.sub(rf"(?<=<!-- {mark} -->)[^<]*(?=<!-- / -->)", value, walked)
    return walked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--silences", action="store_true", help="list waits of more than ten seconds; leave the pages")
    options = parser.parse_args()
    data = Path(os.environ.get("DISTCSE_DATA", "../shared/data")).resolve(strict=True)
    for page in options.pages:
        with tempfile.TemporaryDirectory(prefix="journey") as folder:
            (Path(folder) / "data").symlink_to(data)
            (Path(folder) / "DISTCSE").symlink_to(Path(__file__).resolve().parents[1])
            shell = Shell(Path(folder))
            try:
                begun = time.perf_counter()
                walked = walk(page.read_text(encoding="utf-8"), shell, quiet=not options.silences)
                if options.silences:
                    minutes = (time.perf_counter() - begun) / 60
                    print("\n".join([f"{page}: {minutes:.0f} minutes", *shell.silences]), flush=True)
                else:
                    page.write_text(walked, encoding="utf-8")
            finally:
                shell.close()


if __name__ == "__main__":
    main()
