"""`python -m controller.cli` is `trimtab`, for where the script is not on the PATH."""

from controller.cli import main

main()
