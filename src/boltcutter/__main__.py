"""``python -m boltcutter <command>``, where the console command is not on the path."""

from boltcutter.cli.commands import main

if __name__ == "__main__":
    main()
