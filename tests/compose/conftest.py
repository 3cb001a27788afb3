"""`make test-compose` starts these tests; others leave them alone, since they need Podman and minutes."""

import os

ENABLED = "TRIMTAB_TEST_COMPOSE"
"""Names the folder where Podman keeps its images from run to run."""

collect_ignore = [] if ENABLED in os.environ else ["test_demo.py"]
