"""`stronghold plan`: what fits, how fast, and what bounds it, before anything runs."""

from __future__ import annotations

from stronghold.tools.estimate.answer import answer as answer
from stronghold.tools.estimate.answer import sweep as sweep
from stronghold.tools.estimate.answer import with_fastest_chunk as with_fastest_chunk
from stronghold.tools.estimate.answer import with_largest_batch as with_largest_batch
from stronghold.tools.estimate.page import config_text as config_text
from stronghold.tools.estimate.page import draw as draw
from stronghold.tools.estimate.page import page as page
from stronghold.tools.estimate.page import table as table
from stronghold.tools.estimate.question import Question as Question
from stronghold.tools.estimate.question import understand as understand
