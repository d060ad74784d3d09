//! How a struct of the driver lies in bytes: a size and the fields that are read.
//!
//! A [`Layout`] is data: size, and per field its meaning, upstream name, offset and width. That a
//! field ends inside its struct is asserted when the program is compiled; that the bytes are as
//! long as the struct is checked when a [`View`] is made. So a read can't leave the bytes,
//! whichever program sent them. Numbers are little-endian, as on all machines that the driver runs
//! on. What a field is good for is not known here.

/// What a field is to us; its upstream name stands next to it in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Handle of the client, the root of all its objects.
    Client,
    /// Handle of the object above.
    Parent,
    /// Handle of the object itself: made, freed, mapped or asked.
    Handle,
    /// Class of the object.
    Class,
    /// Address of further parameters.
    Params,
    /// What the caller says their size is.
    ParamsSize,
    /// Address of a mask of access rights.
    Rights,
    /// Flag bits.
    Flags,
    /// Where the driver writes its `NV_STATUS`.
    Status,
    /// Bytes of memory asked for.
    Size,
    /// Bytes of memory less one: asked for, or given.
    Limit,
    /// `NVOS32_ATTR_*` bits.
    Attributes,
    /// `NVOS32_ATTR2_*` bits.
    Attributes2,
    /// Rows of a surface.
    Height,
    /// Bytes from row to row of a surface.
    Pitch,
    /// Which function of a call of many.
    Function,
    /// Bytes of memory there are.
    TotalMemory,
    /// Bytes of memory left.
    FreeMemory,
    /// Bytes of the largest free block.
    LargestFree,
    /// Number of a wrapped call, or of a control.
    Command,
    /// Bytes of a wrapped call's struct.
    CommandSize,
    /// Client that owns the object a duplicate is made of.
    SourceClient,
    /// The object a duplicate is made of.
    SourceHandle,
    /// A file descriptor of the caller.
    Descriptor,
    /// Entries of a list.
    Count,
    /// A list, or its address.
    List,
    /// First address of a range.
    Base,
    /// Bytes of a range.
    Length,
    /// The first place of a list in a file of exported objects.
    Offset,
    /// The GPU, by its 16-byte UUID.
    Uuid,
    /// The GPU, by the driver's device number.
    Device,
    /// What kind of memory it is, or the kinds of a list.
    Kind,
}

/// A field of a struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// What it is to us.
    pub meaning: Meaning,
    /// What the header calls it, as C would reach it.
    pub name: &'static str,
    /// Bytes before it.
    pub offset: usize,
    /// Its bytes.
    pub width: usize,
}

/// A struct, as far as it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    name: &'static str,
    size: usize,
    fields: &'static [Field],
}

/// Bytes that are as long as their struct.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    layout: &'static Layout,
    bytes: &'a [u8],
}

/// New bytes for one field of a struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patch {
    offset: usize,
    width: usize,
    value: [u8; 8],
}

impl Layout {
    /// Of a struct in which nothing is known.
    pub const UNKNOWN: Layout = Layout { name: "", size: 0, fields: &[] };

    /// The struct `name` of `size` bytes.
    ///
    /// Made in constants only, so that a field beyond the end fails the build.
    #[must_use]
    pub const fn new(name: &'static str, size: usize, fields: &'static [Field]) -> Self {
        let mut at = 0;
        while at < fields.len() {
            assert!(fields[at].offset + fields[at].width <= size, "a field ends beyond its struct");
            at += 1;
        }
        Self { name, size, fields }
    }

    /// What the header calls it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The fields that are read.
    #[must_use]
    pub const fn fields(&self) -> &'static [Field] {
        self.fields
    }

    /// The field of that meaning, where the struct has one.
    #[must_use]
    pub fn field(&self, meaning: Meaning) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.meaning == meaning)
    }

    /// `bytes` as this struct, or `None` where their size is another.
    #[must_use]
    pub fn view<'a>(&'static self, bytes: &'a [u8]) -> Option<View<'a>> {
        (bytes.len() == self.size).then_some(View { layout: self, bytes })
    }

    /// What to write so that the field has `value`.
    ///
    /// `None` where the struct has no such number, or `value` doesn't fit it.
    #[must_use]
    pub fn patch(&self, meaning: Meaning, value: u64) -> Option<Patch> {
        let field = self.field(meaning)?;
        let fits = match field.width {
            8 => true,
            width @ 1..8 => value >> (8 * width) == 0,
            _ => false,
        };
        fits.then(|| Patch { offset: field.offset, width: field.width, value: value.to_le_bytes() })
    }
}

impl<'a> View<'a> {
    /// The struct that the bytes are.
    #[must_use]
    pub fn layout(&self) -> &'static Layout {
        self.layout
    }

    /// The bytes of a field.
    #[must_use]
    pub fn bytes(&self, meaning: Meaning) -> Option<&'a [u8]> {
        let field = self.layout.field(meaning)?;
        self.bytes.get(field.offset..field.offset.checked_add(field.width)?)
    }

    /// The value of a field, where it is a number of at most eight bytes.
    #[must_use]
    pub fn u64(&self, meaning: Meaning) -> Option<u64> {
        let bytes = self.bytes(meaning)?;
        let mut value = [0; 8];
        value.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(value))
    }

    /// The value of a field, where it is a number of at most four bytes.
    #[must_use]
    pub fn u32(&self, meaning: Meaning) -> Option<u32> {
        let field = self.layout.field(meaning)?;
        (field.width <= 4).then(|| self.u64(meaning)).flatten()?.try_into().ok()
    }
}

impl Patch {
    /// Four bytes at `offset`, for lists, whose entries are no fields.
    #[must_use]
    pub(super) fn word(offset: usize, value: u32) -> Self {
        Self { offset, width: 4, value: u64::from(value).to_le_bytes() }
    }

    /// Eight bytes at `offset`, for addresses.
    #[must_use]
    pub(super) fn long(offset: usize, value: u64) -> Self {
        Self { offset, width: 8, value: value.to_le_bytes() }
    }

    /// Bytes of the struct before the new ones.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The new bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.value.get(..self.width).unwrap_or(&self.value)
    }

    /// Writes the new bytes; `false`, and nothing written, where `target` is too short.
    #[must_use]
    pub fn apply(&self, target: &mut [u8]) -> bool {
        let end = self.offset.saturating_add(self.bytes().len());
        let Some(place) = target.get_mut(self.offset..end) else { return false };
        place.copy_from_slice(self.bytes());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: &[Field] = &[
        Field { meaning: Meaning::Flags, name: "flags", offset: 0, width: 2 },
        Field { meaning: Meaning::Size, name: "size", offset: 4, width: 8 },
        Field { meaning: Meaning::Uuid, name: "uuid", offset: 12, width: 16 },
    ];
    static LAYOUT: Layout = Layout::new("sample", 28, FIELDS);

    #[test]
    fn view_needs_bytes_of_the_exact_size() {
        for len in 0..64 {
            assert_eq!(LAYOUT.view(&vec![0; len]).is_some(), len == 28);
        }
    }

    /// Numbers are little-endian, and no wider than asked.
    #[test]
    fn numbers_are_little_endian_and_width_checked() {
        let bytes: Vec<u8> = (0..28).collect();
        let view = LAYOUT.view(&bytes).unwrap();
        assert_eq!(view.u32(Meaning::Flags), Some(0x0100));
        assert_eq!(view.u64(Meaning::Size), Some(0x0b0a_0908_0706_0504));
        assert_eq!(view.u32(Meaning::Size), None);
        assert_eq!(view.u64(Meaning::Uuid), None);
        assert_eq!(view.bytes(Meaning::Uuid).map(<[u8]>::len), Some(16));
        assert_eq!(view.u64(Meaning::Status), None);
    }

    #[test]
    fn patch_stays_within_its_field_and_target() {
        assert_eq!(LAYOUT.patch(Meaning::Flags, 0x1_0000), None);
        assert_eq!(LAYOUT.patch(Meaning::Uuid, 0), None);
        let patch = LAYOUT.patch(Meaning::Flags, 0xbeef).unwrap();
        assert_eq!((patch.offset(), patch.bytes()), (0, &[0xef, 0xbe][..]));
        let mut short = [0; 1];
        assert!(!patch.apply(&mut short));
        assert_eq!(short, [0]);
        let mut target = [0; 28];
        assert!(patch.apply(&mut target));
        assert_eq!(target[..3], [0xef, 0xbe, 0]);
    }
}
