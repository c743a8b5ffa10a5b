"""`stronghold plan`: what fits, how fast, and what bounds it, before anything runs."""

from __future__ import annotations

from stronghold.forecast.answer import answer as answer
from stronghold.forecast.answer import sweep as sweep
from stronghold.forecast.answer import with_fastest_chunk as with_fastest_chunk
from stronghold.forecast.answer import with_largest_batch as with_largest_batch
from stronghold.forecast.page import config_text as config_text
from stronghold.forecast.page import draw as draw
from stronghold.forecast.page import page as page
from stronghold.forecast.page import table as table
from stronghold.forecast.question import Question as Question
from stronghold.forecast.question import understand as understand
