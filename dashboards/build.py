"""`python -m dashboards.build` writes `grafana/*.json` and docs/metrics.md from the code."""

from pathlib import Path

from dashboards.board import encode
from dashboards.boards import BOARDS
from dashboards.metrics_table import PAGE, page

FOLDER = Path(__file__).parent / "grafana"


def main() -> None:
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(encode(board))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
