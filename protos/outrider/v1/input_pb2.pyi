from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AudioFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIO_FORMAT_UNSPECIFIED: _ClassVar[AudioFormat]
    AUDIO_FORMAT_S16LE: _ClassVar[AudioFormat]
    AUDIO_FORMAT_F32LE: _ClassVar[AudioFormat]
AUDIO_FORMAT_UNSPECIFIED: AudioFormat
AUDIO_FORMAT_S16LE: AudioFormat
AUDIO_FORMAT_F32LE: AudioFormat

class EncoderTokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Audio(_message.Message):
    __slots__ = ("samples", "format", "sample_rate")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    samples: bytes
    format: AudioFormat
    sample_rate: int
    def __init__(self, samples: _Optional[bytes] = ..., format: _Optional[_Union[AudioFormat, str]] = ..., sample_rate: _Optional[int] = ...) -> None: ...

class LogMelFeatures(_message.Message):
    __slots__ = ("values", "mels", "frames")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MELS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    mels: int
    frames: int
    def __init__(self, values: _Optional[bytes] = ..., mels: _Optional[int] = ..., frames: _Optional[int] = ...) -> None: ...

class EncoderInput(_message.Message):
    __slots__ = ("token_ids", "audio", "features")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    token_ids: EncoderTokens
    audio: Audio
    features: LogMelFeatures
    def __init__(self, token_ids: _Optional[_Union[EncoderTokens, _Mapping]] = ..., audio: _Optional[_Union[Audio, _Mapping]] = ..., features: _Optional[_Union[LogMelFeatures, _Mapping]] = ...) -> None: ...
