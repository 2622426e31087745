// Runs in every document before the page's own scripts.
(() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`
    /* The page itself draws the popup, so it is in the screenshot and can be clicked. */
    select:not([multiple]):not([size]), select[size="1"]:not([multiple]) { appearance: base-select !important; }
    select:not([multiple]):not([size])::picker(select), select[size="1"]:not([multiple])::picker(select) {
      appearance: base-select !important;
    }
    /* A blinking caret would make equal states look different; the focus ring stays. */
    * { caret-color: transparent !important; }
  `);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
})();
