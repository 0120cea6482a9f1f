"""Every setting a user can make, as frozen records: one per table of a recipe, with the vetted values as defaults.

A record checks its fields when it is made, and a record that holds two settings refuses what cannot work together.
Neither torch nor transformers is imported here, so that the command line answers at once.
"""

from threepo.config.commands import EvaluationConfig as EvaluationConfig
from threepo.config.commands import SFTConfig as SFTConfig
from threepo.config.commands import TrainConfig as TrainConfig
from threepo.config.learning import AdamWConfig as AdamWConfig
from threepo.config.learning import BatchingConfig as BatchingConfig
from threepo.config.learning import EssScheduleConfig as EssScheduleConfig
from threepo.config.learning import IVONConfig as IVONConfig
from threepo.config.learning import ObjectiveConfig as ObjectiveConfig
from threepo.config.learning import OptimizerConfig as OptimizerConfig
from threepo.config.learning import ScheduleConfig as ScheduleConfig
from threepo.config.method import Advantage as Advantage
from threepo.config.method import Correction as Correction
from threepo.config.method import Method as Method
from threepo.config.sections import EngineConfig as EngineConfig
from threepo.config.sections import EvalConfig as EvalConfig
from threepo.config.sections import ModelConfig as ModelConfig
from threepo.config.sections import RewardConfig as RewardConfig
from threepo.config.sections import RunConfig as RunConfig
from threepo.config.sections import SamplingConfig as SamplingConfig
from threepo.config.sections import SandboxConfig as SandboxConfig
from threepo.config.sections import TinyConfig as TinyConfig
from threepo.config.sections import VLLMConfig as VLLMConfig
from threepo.config.sources import BenchmarksConfig as BenchmarksConfig
from threepo.config.sources import ConversationConfig as ConversationConfig
from threepo.config.sources import DataConfig as DataConfig
from threepo.config.sources import DemonstrationConfig as DemonstrationConfig
