"""A pod that a server keeps does what the contract of a store says."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.pod_contract import PodContract
from support.pod_servers import TOKEN, served

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.server.server_store import ServerStore


class TestServerStore(PodContract):
    @pytest.fixture
    def opened(self, tmp_path):
        with ExitStack() as stack:

            def make(pod):
                store = FolderStore(make_pod(tmp_path, pod))
                stack.callback(store.close)
                port = stack.enter_context(served(store))

                def open_as(user):
                    client = ServerStore(f"http://127.0.0.1:{port}", TOKEN, 30.0, user=user)
                    stack.callback(client.close)
                    return client

                return open_as

            yield make
