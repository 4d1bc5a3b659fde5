"""`python -m imgscale.app` is the `imgscale` command, for where scripts aren't on the PATH."""

from imgscale.app.main import main

main()
