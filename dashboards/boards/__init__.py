"""The five boards, the first screen first."""

from dashboards.boards.goodput import GOODPUT
from dashboards.boards.pools import POOLS
from dashboards.boards.router import ROUTER
from dashboards.boards.transfers import TRANSFERS
from dashboards.boards.tuner import TUNER

BOARDS = (GOODPUT, POOLS, TRANSFERS, TUNER, ROUTER)
