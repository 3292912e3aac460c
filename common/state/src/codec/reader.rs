//! What parts and entries have in common on the way in: framing, checksums, and a reader that never
//! goes past the end and allocates nothing that the bytes do not cover.

use bytes::Bytes;

use super::{ALIGN, CodecError, FORMAT_VERSION};
use crate::{DType, HostTensor};

/// Checks magic and version and returns the length announced behind them, which `bytes` cover.
pub(super) fn length_behind(bytes: &[u8], what: &'static str, magic: [u8; 4]) -> Result<usize, CodecError> {
    // As far as the checksum, so that it can be looked at.
    const NEED: usize = 20;
    let Some(start) = bytes.first_chunk::<NEED>() else {
        return Err(CodecError::Truncated { need: NEED as u64, got: bytes.len() });
    };
    let got: [u8; 4] = start[..4].try_into().expect("four bytes");
    if got != magic {
        return Err(CodecError::Magic { what, got });
    }
    let version = u16::from_le_bytes(start[4..6].try_into().expect("two bytes"));
    if version != FORMAT_VERSION {
        return Err(CodecError::Version { got: version });
    }
    let length = u64::from_le_bytes(start[8..16].try_into().expect("eight bytes"));
    if length > bytes.len() as u64 {
        return Err(CodecError::Truncated { need: length, got: bytes.len() });
    }
    if length < ALIGN as u64 || !length.is_multiple_of(ALIGN as u64) {
        return Err(CodecError::Malformed("a length that is no multiple of the alignment"));
    }
    Ok(length as usize)
}

/// CRC-32C of `bytes` without the four at `skip`.
pub(super) fn checksum(bytes: &[u8], skip: usize) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..skip]), &bytes[skip + 4..])
}

pub(super) fn check(bytes: &[u8], at: usize) -> Result<(), CodecError> {
    let stored = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let computed = checksum(bytes, at);
    if stored == computed { Ok(()) } else { Err(CodecError::Checksum { stored, computed }) }
}

pub(super) fn dtype_code(dtype: DType) -> u8 {
    match dtype {
        DType::F32 => 1,
        DType::Bf16 => 2,
        DType::F16 => 3,
        DType::F64 => 4,
    }
}

fn dtype_of(code: u8) -> Result<DType, CodecError> {
    const KNOWN: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F64];
    let known = KNOWN.into_iter().find(|dtype| dtype_code(*dtype) == code);
    known.ok_or(CodecError::Unknown { field: "data type", value: code.into() })
}

/// Reads fields in order; never past the end.
pub(super) struct Reader<'a> {
    pub bytes: &'a Bytes,
    /// Offset of the next field.
    pub at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Result<Bytes, CodecError> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            let need = (self.at as u64).saturating_add(count as u64);
            return Err(CodecError::Truncated { need, got: self.bytes.len() });
        };
        let taken = self.bytes.slice(self.at..end);
        self.at = end;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        Ok(self.take(N)?[..].try_into().expect("as many bytes as asked for"))
    }

    pub fn extent(&mut self) -> Result<usize, CodecError> {
        self.array().map(|b| u32::from_le_bytes(b) as usize)
    }

    pub fn words(&mut self, count: usize) -> Result<Vec<u32>, CodecError> {
        let size = count.checked_mul(4).ok_or(CodecError::Malformed("a list too long to exist"))?;
        let bytes = self.take(size)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// All headers, then all data, of `N` tensors, of which the one with the index `widthless` may have an empty last
    /// axis.
    pub fn tensors<const N: usize>(&mut self, widthless: Option<usize>) -> Result<[HostTensor; N], CodecError> {
        let mut headers = Vec::with_capacity(N);
        for _ in 0..N {
            let [dtype, rank, zero_a, zero_b] = self.array()?;
            if [zero_a, zero_b] != [0; 2] {
                return Err(CodecError::Malformed("reserved bytes that are not zero"));
            }
            let shape = self.words(rank.into())?;
            // Only the outermost axis may be empty (no kept heads): an empty inner one would let the others be anything.
            // Values that are shared with the keys have no width, but otherwise the extents of the keys.
            let checked = if widthless == Some(headers.len()) { shape.len().saturating_sub(1) } else { shape.len() };
            if shape.iter().take(checked).skip(1).any(|extent| *extent == 0) {
                return Err(CodecError::Malformed("a tensor with an empty inner axis"));
            }
            headers.push((dtype_of(dtype)?, shape));
        }
        let mut tensors = Vec::with_capacity(N);
        for (dtype, shape) in headers {
            let shape: Vec<usize> = shape.into_iter().map(|extent| extent as usize).collect();
            let size = shape.iter().try_fold(dtype.size(), |size, extent| size.checked_mul(*extent));
            let size = size.ok_or(CodecError::Malformed("a tensor too large to exist"))?;
            self.skip_padding()?;
            tensors.push(HostTensor::new(dtype, shape, self.take(size)?));
        }
        Ok(tensors.try_into().expect("one tensor per header"))
    }

    fn skip_padding(&mut self) -> Result<(), CodecError> {
        let padding = self.take(self.at.next_multiple_of(ALIGN) - self.at)?;
        if padding.iter().all(|b| *b == 0) { Ok(()) } else { Err(CodecError::Malformed("padding that is not zero")) }
    }

    /// Checks that only padding is left.
    pub fn finish(&mut self) -> Result<(), CodecError> {
        self.skip_padding()?;
        let extra = self.bytes.len() - self.at;
        if extra == 0 { Ok(()) } else { Err(CodecError::Trailing { extra }) }
    }
}
