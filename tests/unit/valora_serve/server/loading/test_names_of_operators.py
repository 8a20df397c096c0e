"""What an operator has named is not taken by adapters that requests load, whoever came first."""

from tests.support.http_helpers import ADMIN, adapter, bundle, loading, serving

LOADS = [
    ("load_bundle", {"bundle_path": "b"}, ("car", "bus"), "unload_bundle", {"bundle_name": "cars"}),
    ("load_lora_adapter", {"lora_name": "mine", "lora_path": "own", "load_inplace": True},
     ("mine",), "unload_lora_adapter", {"lora_name": "mine"}),
    ("contexts", {"name": "rules", "document": "no dogs", "replace": True}, ("rules",),
     "contexts/rules", None),
]  # fmt: skip


def test_what_an_operator_loads_replaces_what_requests_loaded(tmp_path):
    bundle(tmp_path / "adapters" / "b", ("car", "bus"))
    adapter(tmp_path / "adapters" / "own")
    for name in ("car", "bus", "mine", "rules", "free"):
        adapter(tmp_path / "store" / name)
    sources = {"adapter_sources": (str(tmp_path / "store"),), "adapter_allow": ("*",)}
    chosen = loading(tmp_path, adapter_cache=str(tmp_path / "cache"), **sources)
    with serving(**chosen) as server:
        server.client.headers["authorization"] = f"Bearer {ADMIN}"

        def asked(*names):
            body = {"prompt": "x", "max_tokens": 1}
            return {
                server.client.post("/v1/completions", json=body | {"model": name}).status_code
                for name in names
            }

        def resolvers(*names):
            listed = server.client.get("/v1/models").json()["data"]
            return {one["resolver"] for one in listed if one["id"] in names}

        for path, body, names, unload, gone in LOADS:
            assert asked(*names, "free") == {200}
            assert resolvers(*names, "free") == {"file"}
            for _ in range(2):
                server.client.post(f"/v1/{path}", json=body).raise_for_status()
                assert (resolvers(*names), resolvers("free")) == ({None}, {"file"})
                assert asked(*names, "free") == {200}
                verb = "DELETE" if gone is None else "POST"
                server.client.request(verb, f"/v1/{unload}", json=gone).raise_for_status()
                assert asked(*names) == {404}
