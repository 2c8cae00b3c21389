"""The MCP server of the shop, with MCP's Python SDK. It talks on standard input and output."""

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from shop import GOODS

server = MCPServer("shop", log_level="ERROR")


@server.tool()
def price(item: str) -> int:
    """Look up what an item costs."""
    return find(item).price


@server.tool()
def pieces(item: str) -> int:
    """Look up how many pieces of an item are left."""
    return find(item).pieces


def find(item):
    if item not in GOODS:
        raise ToolError("no such item")
    return GOODS[item]


if __name__ == "__main__":
    server.run()
