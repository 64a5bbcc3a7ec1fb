//! Fixed layouts of bytes, little endian.

/// Appends fields to a layout of bytes.
pub(crate) struct Layout(pub(crate) Vec<u8>);

impl Layout {
    pub(crate) fn new(magic: &[u8; 8], version: u32) -> Self {
        let mut layout = Self(magic.to_vec());
        layout.push(&version.to_le_bytes());
        layout
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn push_number(&mut self, number: u64) {
        self.push(&number.to_le_bytes());
    }
}

/// Takes fields off a layout of bytes.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `N` bytes; zeros once the layout is used up, which callers exclude by its length.
    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, tail) = self.0.split_at(N.min(self.0.len()));
        self.0 = tail;
        let mut field = [0; N];
        field[..head.len()].copy_from_slice(head);
        field
    }

    pub(crate) fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
