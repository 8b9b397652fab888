"""The picture in the README: presses the page's own button.

python benchmarks/picture.py runs/demo/report.html docs/loss_against_bytes.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import Visit, browser, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    if why := missing():
        sys.exit(why)
    with browser() as chromium:
        seen = Visit(chromium, args.page.resolve())
        with seen.page.expect_download() as waiting:
            seen.page.click("#picture")
        waiting.value.save_as(args.file)
        seen.close()


if __name__ == "__main__":
    main()
