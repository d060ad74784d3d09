//! No type of the monitor has so much in it that its file is no boundary any more.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use super::{is_tests, root, sources};

/// Fields, and methods in all files together, that a type has at most.
const MOST_FIELDS: usize = 12;
const MOST_METHODS: usize = 25;

/// Types with more methods, and why.
const MORE_METHODS: [&str; 1] = [
    // Two for each word of the memory: one reads it, and one writes it.
    "JournalMap",
];

/// Fields and methods of types, tests left out.
#[derive(Default)]
struct Sizes(BTreeMap<String, (usize, usize)>);

impl<'ast> Visit<'ast> for Sizes {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // The only modules within files are tests.
        if item.content.is_none() {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.0.entry(item.ident.to_string()).or_default().0 = item.fields.len();
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty)
            && let Some(name) = of.path.segments.last()
        {
            let methods = item.items.iter().filter(|item| matches!(item, syn::ImplItem::Fn(_)));
            self.0.entry(name.ident.to_string()).or_default().1 += methods.count();
        }
    }
}

#[test]
fn no_type_of_the_monitor_has_many_fields_or_methods() {
    let mut sizes = Sizes::default();
    let model = root().join("src/monitor/model");
    let files = sources(&root().join("src/monitor")).into_iter();
    for file in files.filter(|file| !is_tests(file) && !file.starts_with(&model)) {
        let text = std::fs::read_to_string(&file).expect("sources are text");
        sizes.visit_file(&syn::parse_file(&text).expect("sources are Rust"));
    }
    assert!(sizes.0.len() > 100, "nothing was found: {}", sizes.0.len());
    let is_large = |(name, (fields, methods)): &(String, (usize, usize))| {
        let may = MORE_METHODS.contains(&name.as_str());
        *fields > MOST_FIELDS || *methods > MOST_METHODS && !may
    };
    let large: Vec<_> = sizes.0.into_iter().filter(is_large).collect();
    assert!(large.is_empty(), "{large:#?}");
}
