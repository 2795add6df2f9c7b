import torch.cuda.stream as stream  # SWV009
from torch.distributed.pipeline.sync import Pipe  # SWV009
from vllm.entrypoints import api_server  # SWV009
