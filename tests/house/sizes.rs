//! No type of the monitor has so much in it, or in so many files, that its file is no boundary any more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use syn::visit::{self, Visit};

use super::{is_tests, root, sources};

/// Fields, and methods in all files together, that a type has at most.
const MOST_FIELDS: usize = 13;
const MOST_METHODS: usize = 25;

/// Types with more methods, and why.
const MORE_METHODS: [&str; 1] = [
    // Two for each word of the memory: one reads it, and one writes it.
    "JournalMap",
];

/// A type of the monitor, tests left out.
#[derive(Debug, Default)]
struct Size {
    fields: usize,
    methods: usize,
    /// The files that have methods of the type.
    files: BTreeSet<PathBuf>,
}

/// The types of all files that were visited, and the file that is visited.
#[derive(Default)]
struct Sizes {
    all: BTreeMap<String, Size>,
    file: PathBuf,
}

impl<'ast> Visit<'ast> for Sizes {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // The only modules within files are tests.
        if item.content.is_none() {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.all.entry(item.ident.to_string()).or_default().fields = item.fields.len();
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty)
            && let Some(name) = of.path.segments.last()
        {
            let methods = item.items.iter().filter(|item| matches!(item, syn::ImplItem::Fn(_)));
            let size = self.all.entry(name.ident.to_string()).or_default();
            size.methods += methods.count();
            size.files.insert(self.file.clone());
        }
    }
}

fn sizes() -> BTreeMap<String, Size> {
    let mut sizes = Sizes::default();
    let model = root().join("src/monitor/model");
    let files = sources(&root().join("src/monitor")).into_iter();
    for file in files.filter(|file| !is_tests(file) && !file.starts_with(&model)) {
        let text = std::fs::read_to_string(&file).expect("sources are text");
        sizes.file = file;
        sizes.visit_file(&syn::parse_file(&text).expect("sources are Rust"));
    }
    assert!(sizes.all.len() > 100, "nothing was found: {}", sizes.all.len());
    sizes.all
}

#[test]
fn no_type_of_the_monitor_has_many_fields_or_methods() {
    let is_large = |(name, size): &(String, Size)| {
        let may = MORE_METHODS.contains(&name.as_str());
        size.fields > MOST_FIELDS || size.methods > MOST_METHODS && !may
    };
    let large: Vec<_> = sizes().into_iter().filter(is_large).collect();
    assert!(large.is_empty(), "{large:#?}");
}

#[test]
fn the_methods_of_a_type_of_the_monitor_stand_in_one_file() {
    let spread: Vec<_> = sizes().into_iter().filter(|(_, size)| size.files.len() > 1).collect();
    assert!(spread.is_empty(), "{spread:#?}");
}
