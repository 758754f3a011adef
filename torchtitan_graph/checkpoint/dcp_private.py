"""The private torch names that checkpoints need, each with why, and what would replace it."""

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.tensor.placement_types import _StridedShard

# The placement that FSDP2 gives a dim which tensor parallel shards too. It is no subclass of `Shard`, and no public
# method tells its order or its split factor. A public order of sharding in the tensor's layout would replace it.
StridedShard = _StridedShard

# Where in which file a tensor is, as the pickled `.metadata` has it. An index in JSON would replace it.
StorageInfo = _StorageInfo

# Every global that torch's writer puts into the pickled `.metadata`, besides dtypes (`torch.float32`). All of them
# build plain records. The mark of a pickled object is among them so that it can be refused by its name. An index in
# JSON would replace the pickle and this list.
METADATA_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
