"""For programs and agents: results and mistakes of commands as JSON, and a server of the Model Context Protocol."""
