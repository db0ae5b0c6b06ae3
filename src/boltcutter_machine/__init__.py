"""For editors and programs: the result of a command as JSON, JSON Schemas of the configuration, and an MCP server."""
