"""What torchrun tells the ranks that it starts."""

HOST = "127.0.0.1"


def as_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Variables of a rank of one node; the store at `port` is that of whoever starts it, as torchrun's is its agent's.

    So no port is raced for.
    """
    world = str(world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"ranks-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
